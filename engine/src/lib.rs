//! tierkeep-engine
