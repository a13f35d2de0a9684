"""Pure tensor functions of the algorithms: no I/O, no state, no process group."""
