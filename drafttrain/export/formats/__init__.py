"""One file per format of exported drafters, in this order: the names of its tensors, which drafters it cannot hold, what is
written, how it is read into a checkpoint, and the stacks that load it (`ROWS`).
"""
