//! What crosses crates: swarms of processes, namespaces, real clients.
