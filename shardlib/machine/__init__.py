"""The machine: meshes, chips, processes, and targets to compile for."""
