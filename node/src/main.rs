//! The binary `shoal`.
fn main() {}
