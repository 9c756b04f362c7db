//! The front door: HTTP APIs and the dashboard of a Shoal node.
