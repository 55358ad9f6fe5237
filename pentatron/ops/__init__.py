"""Single passes over memory that torch would make several of: a Triton kernel on a GPU, plain torch elsewhere."""
