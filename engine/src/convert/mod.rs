//! Writing containers.
