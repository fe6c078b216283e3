//! `tierkeep demo`.
use super::Context;
use crate::args::DemoArgs;
use crate::exit::Outcome;
use anyhow::Result;
pub(crate) fn run(_args: &DemoArgs, _context: &Context) -> Result<Outcome> {
    Ok(Outcome::Fine)
}
