//! tierkeep-plans
