//! Moves the bytes of tensors between nodes: channels and their carriers.
