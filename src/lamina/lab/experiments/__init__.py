"""One file per experiment; the file name is the registration. What a file holds is said in `lamina.lab.experiment`."""
