"""The whole system under a fake clock: the real engine, service, sessions and codec; simulated sockets, processes and loops.

A seed decides everything: who runs, what breaks and when. What a seed does is in its trace, whose hash two runs share.

- `clock`: the time line, processes that can be stopped and killed, and loops written as generators of waits
- `network`: sockets that lose, delay, repeat and reorder frames, and connections that break
- `daemon`: the real `Service` around the real `Engine`; it is killed, frozen, stopped and started with a new boot id
- `shell`: the real `Session` in a model of `client/transport.py`
- `drawing`: batches on their way from a session's leave to a loop, ahead of it or in step
- `ledger`: what a job was given, against an order and a count that share no code with the product
- `jobs`: training runs of ranks and loader workers, with their checkpoints, crashes and resumptions
- `faults`: which faults a seed has, and their injection
- `world`: all of it, the invariants, and the quiet end in which everything must have healed
"""
