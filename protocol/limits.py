"""Every bound of dataserve by name, with the relations between them asserted. PROTOCOL.md and FORMAT.md list the same.

Units stand last in a name. A bound that is not here does not exist.
"""

import re

# --- the wire -------------------------------------------------------------------------------------------------------
FRAME_BYTES = 64 * 1024  #: a larger frame is dropped with its connection; the encoder refuses to make one
TEXT_CHARS = 2048  #: an error's text or remedy
PATH_BYTES = 4096  #: a store's path
JOB_CHARS = 128  #: a job's name
HOST_CHARS = 255  #: a host's name
INSTANCE_BYTES = 16  #: a data set object's identity
BOOT_BYTES = 16  #: a daemon's identity
WINDOW_BATCHES = 256  #: ranges in one `ranges`
STATUS_DATASETS = 2  #: data sets in one page of `status`
STATUS_CONSUMERS = 24  #: consumers in one page of `status`
PLAN_CHARS = 64  #: a text or a field's name in a plan
PLAN_FIELDS = 8  #: fields of a plan, and of each map in it
PLAN_DEPTH = 2  #: a plan, and the maps in it

# --- arithmetic -----------------------------------------------------------------------------------------------------
ROWS = 2**32  #: rows of a store, positions of a plan
SEED = 2**64  #: seeds lie below
EPOCH = 2**32  #: epochs lie below
WORLD_SIZE = 2**16
BATCH_SIZE = 2**31 - 1
WORKERS = 256  #: loader workers of one rank
U64 = 2**64

# --- the store ------------------------------------------------------------------------------------------------------
MANIFEST_BYTES = 64 * 1024 * 1024
HEADER_BYTES = 4096  #: a column's data starts here, in every .npy of ours
COLUMNS = 512
COLUMN_CHARS = 64
RANK = 16  #: dimensions of one row
ROW_BYTES = 2**31  #: one row of a fixed column, one element of a ragged one
CHUNK_BYTES = 4 * 1024 * 1024  #: what a chunk of rows aims at
CHUNK_ROWS = 65536
STRUCTURE_DEPTH = 8
CLASSES = 1_000_000
SKIPPED = 10_000  #: samples that `skipped` lists; where there are more its last item says how many

# --- time -----------------------------------------------------------------------------------------------------------
DEAD_S = 30.0  #: a holder whose process cannot be looked up is dead after this silence
BEAT_S = 2.0  #: a client with nothing else to say says `beat` this often
GRANT_WAIT_S = 0.2  #: a batch waits this long for its range, then the client computes it
SILENT_S = 5.0  #: after this silence of the daemon a client is alone
TIMEOUT_S = 60.0  #: default of `timeout_s`: what a client waits for a daemon, a rank, a batch
RETRY_S = 0.5  #: an unanswered request is sent again after this
TICK_S = 1.0  #: the daemon looks after its processes this often
ORDER_SHARED_ROWS = 2**22  #: above this an epoch's order is kept once in a file and mapped by all

# --- read-ahead -----------------------------------------------------------------------------------------------------
AHEAD_BATCHES = 16  #: the daemon has the kernel read so many batches ahead of each cursor at least,
AHEAD_S = 3.0  #: and what a consumer takes in this time: it tells its place once a second
AHEAD_BYTES = 256 * 1024 * 1024  #: of one consumer, at most
AHEAD_SHARE = 8  #: of all consumers together: one part in so many of the memory that is available
RESIDENT_EACH_S = 2.0  #: the daemon looks how much of the stores is in memory this often at most

#: Names of data sets.
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
#: Names of columns: they become file names.
COLUMN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
#: Files of columns: no separators, so that none leads out of its folder.
COLUMN_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}")
#: Fingerprints and ids: SHA-256 in hexadecimal.
HEX256 = re.compile(r"[0-9a-f]{64}")
#: How many digits of the fingerprint name the store's folder.
FINGERPRINT_DIGITS = 16
#: The longest path of a Unix socket, its final NUL left out (sun_path of Linux).
SOCKET_PATH_BYTES = 107

assert GRANT_WAIT_S < RETRY_S < BEAT_S < SILENT_S < DEAD_S < TIMEOUT_S
assert TICK_S < AHEAD_S, "a consumer must not come to the end of what was read ahead before it tells its place again"
assert 2 * BEAT_S < SILENT_S, "one lost beat must not make a client feel alone"
assert COLUMNS * (COLUMN_CHARS + 2) + PATH_BYTES + 1024 < FRAME_BYTES, "`described` must fit a frame"
assert WINDOW_BATCHES * 3 * 9 + 256 < FRAME_BYTES, "`ranges` must fit a frame"
_dataset_row_bytes = PATH_BYTES + 4 * TEXT_CHARS + 1024  # a character has 4 bytes at most
_consumer_row_bytes = 4 * JOB_CHARS + 588
assert STATUS_DATASETS * _dataset_row_bytes + STATUS_CONSUMERS * _consumer_row_bytes + 2 * PATH_BYTES < FRAME_BYTES
