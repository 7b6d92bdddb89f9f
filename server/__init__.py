"""The daemon of dataserve, and its command line."""
