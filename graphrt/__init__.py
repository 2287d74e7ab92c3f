"""graphrt: deferred commit of recurrent state, in replayable CUDA graphs."""
