//! `tierkeep try-instructions SET...`: what `doctor` runs in a child process, since an instruction
//! that the processor lacks ends the process. Not shown in the help.

use anyhow::Result;
use tierkeep_engine::trial;

use crate::args::TrialArgs;
use crate::exit::Outcome;
use crate::render;

pub(crate) fn run(args: &TrialArgs) -> Result<Outcome> {
    trial::prepare();
    for set in &args.sets {
        // Said before, so that a death can be laid at a set's door.
        render::data(&format!("{set} begins\n"))?;
        let word = trial::run(set).map_or("unfamiliar", trial::Outcome::as_str);
        render::data(&format!("{set} {word}\n"))?;
    }
    Ok(Outcome::Fine)
}
