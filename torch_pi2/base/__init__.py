"""The base of the package: files, validation, tensors on disk, units, hooks of modules. It knows nothing of neurons."""
