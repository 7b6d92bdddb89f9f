"""What both sides of dataserve agree on: formats, messages, orders and bounds.

Pure: no clock, socket, file or thread.
"""
