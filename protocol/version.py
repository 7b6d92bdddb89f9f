"""The three versions of dataserve, each of its own pace, and nothing else.

A reader compares a version where it reads it; PROTOCOL.md and FORMAT.md state the same numbers (tests/test_specs.py).
"""

#: Versions of the wire that this code speaks, best first.
WIRE_VERSIONS: tuple[int, ...] = (1,)

#: Version of the store's layout and manifest.
STORE_FORMAT = 1

#: Version of a `state_dict`.
STATE_FORMAT = 1

#: Features that a manifest may require of its reader. None exist yet.
STORE_FEATURES: frozenset[str] = frozenset()
