"""The client of dataserve: a data set as a training process sees it."""
