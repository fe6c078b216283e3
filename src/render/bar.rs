//! Progress on standard error, shown on a terminal only.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// One bar; it goes away when dropped.
#[derive(Debug)]
pub(crate) struct Bar(ProgressBar);

impl Bar {
    fn new(template: &str, message: &str) -> Self {
        let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr());
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.set_message(message.to_owned());
        Self(bar)
    }

    /// Bytes done, with speed and time left.
    pub(crate) fn bytes(message: &str) -> Self {
        Self::new("{msg} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec} {eta}", message)
    }

    /// Things done.
    pub(crate) fn count(message: &str) -> Self {
        Self::new("{msg} [{bar:30}] {pos}/{len} {eta}", message)
    }

    /// Layers done of a batch or a token; it moves between them too, for a layer may take long.
    pub(crate) fn layers(message: &str) -> Self {
        let bar = Self::new("{spinner} {msg} {pos} of {len} [{bar:20}] {elapsed}", message);
        bar.tick_every(200);
        bar
    }

    /// Work of unknown length.
    pub(crate) fn spinner(message: &str) -> Self {
        let bar = Self::new("{spinner} {msg}", message);
        bar.tick_every(100);
        bar
    }

    /// Lets it move by itself, which takes a thread: none where nobody sees it.
    fn tick_every(&self, ms: u64) {
        if !self.0.is_hidden() {
            self.0.enable_steady_tick(std::time::Duration::from_millis(ms));
        }
    }

    pub(crate) fn message(&self, message: &str) {
        self.0.set_message(message.to_owned());
    }

    pub(crate) fn set(&self, done: u64, total: u64) {
        if self.0.length() != Some(total) {
            self.0.set_length(total);
        }
        self.0.set_position(done);
    }

    pub(crate) fn clear(&self) {
        self.0.finish_and_clear();
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
