//! The Shoal agent: one inference machine out of the computers on a desk.
