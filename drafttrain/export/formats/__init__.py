"""One file per format of exported drafters: its tensor names, what is written, how it is read, and the stacks that load it."""
