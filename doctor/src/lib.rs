//! tierkeep-doctor
