//! tierkeep-kernels
