"""Files, validation, tensors on disk, units and module hooks; independent of neurons."""
