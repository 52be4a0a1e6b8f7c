"""One file per policy; the file name is the registration."""
