//! The engine: executes exactly the plan that it is given, within its ledger.
#![forbid(unsafe_code)]

pub mod convert;
pub mod text;
