//! How often a request is tried, how long is waited in between, and what it is called when that was enough.
//! What one try is, is `client`'s.

use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use ureq::http::Uri;

use crate::client::{Ask, Client, Context, SLOW_STALLS};
use crate::error::HubError;
use crate::url;

/// After so many stalls' time without anything worth having, no more is tried.
const MOST_STALLS: u32 = 6;
/// The pause within which an interrupt is noticed.
const SLICE: Duration = Duration::from_millis(50);

/// Why one try failed.
pub(crate) enum Failure {
    /// Another try would fail too.
    Fatal(HubError),
    /// Another try may succeed.
    Passing(Passing),
}

pub(crate) enum Passing {
    /// Nothing came.
    Stalled,
    /// Something came, and too little of it.
    Slow,
    Broken(String),
    Unreachable(String),
    /// The server asks to wait.
    Busy {
        status: u16,
        wait: Option<Duration>,
    },
}

impl From<HubError> for Failure {
    fn from(error: HubError) -> Self {
        Self::Fatal(error)
    }
}

impl Client {
    /// Runs a request on a thread of its own: an interrupt does not wait for it, but leaves it.
    pub(crate) fn apart<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Self) -> Result<T, HubError> + Send + 'static,
    ) -> Result<T, HubError> {
        let of_thread = |source| HubError::Io { path: "a thread".into(), source };
        let (sender, receiver) = mpsc::channel();
        let client = Arc::clone(self);
        std::thread::Builder::new()
            .name("tierkeep-hub".to_owned())
            .spawn(move || sender.send(work(&client)))
            .map_err(of_thread)?;
        loop {
            self.check_stop()?;
            match receiver.recv_timeout(SLICE) {
                Ok(result) => return result,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(of_thread(std::io::Error::other(
                        "it ended before its work was done",
                    )));
                }
            }
        }
    }

    /// Tries until it succeeds, fails for good, or has been tried often enough.
    pub(crate) fn with_tries<T>(
        &self,
        ask: &Ask<'_>,
        mut attempt: impl FnMut() -> Result<T, Failure>,
    ) -> Result<T, HubError> {
        let mut waited = Duration::ZERO;
        // How long nothing came, in stalls: nothing once is one, a little for three is three.
        let mut stalls = 0;
        let mut backoff = self.timing.backoff;
        let mut n_tries = 0;
        loop {
            let passing = match attempt() {
                Ok(done) => return Ok(done),
                Err(Failure::Fatal(error)) => return Err(error),
                Err(Failure::Passing(passing)) => passing,
            };
            n_tries += 1;
            // Without a network each try is as good as the first; one more is for a waking laptop.
            let most = match &passing {
                Passing::Unreachable(_) => self.timing.tries.min(2),
                Passing::Stalled | Passing::Slow | Passing::Broken(_) | Passing::Busy { .. } => {
                    self.timing.tries
                }
            };
            stalls += match &passing {
                Passing::Stalled => 1,
                Passing::Slow => SLOW_STALLS,
                Passing::Broken(_) | Passing::Busy { .. } | Passing::Unreachable(_) => 0,
            };
            let pause = match &passing {
                // Who asks for no pause at all is not to be hurried.
                Passing::Busy { wait: Some(wait), .. } => (*wait).max(backoff),
                Passing::Busy { .. }
                | Passing::Stalled
                | Passing::Slow
                | Passing::Broken(_)
                | Passing::Unreachable(_) => backoff,
            };
            waited = waited.saturating_add(pause);
            let is_enough = n_tries >= most || stalls >= MOST_STALLS;
            if is_enough || waited > self.timing.longest_wait {
                return Err(self.given_up(ask, passing, n_tries));
            }
            self.sleep(pause)?;
            backoff = backoff.saturating_mul(2);
        }
    }

    fn given_up(&self, ask: &Ask<'_>, passing: Passing, tries: u32) -> HubError {
        let url = url::shown(ask.url);
        let host = || {
            let uri: Option<Uri> = ask.url.parse().ok();
            uri.and_then(|uri| Some(uri.authority()?.to_string())).unwrap_or_else(|| url.clone())
        };
        match passing {
            Passing::Stalled => {
                let what = format!("nothing came for {} s", self.timing.stall.as_secs());
                HubError::Stalled { url, what, tries }
            }
            Passing::Slow => {
                let seconds = self.timing.stall.saturating_mul(SLOW_STALLS).as_secs();
                let what = format!("less than 1 kB a second came for {seconds} s");
                HubError::Stalled { url, what, tries }
            }
            Passing::Broken(reason) => HubError::Broken { url, reason, tries },
            Passing::Unreachable(reason) => HubError::Unreachable {
                host: host(),
                reason,
                cached: "the cache has nothing of it".to_owned(),
            },
            Passing::Busy { status: 429, wait } => {
                let is_hub = matches!(ask.context, Context::Repo { .. });
                HubError::RateLimited {
                    host: host(),
                    wait_s: wait.map(|wait| wait.as_secs()).filter(|s| *s > 0),
                    token_helps: is_hub && self.token.is_none(),
                }
            }
            Passing::Busy { status, wait } => {
                let wait = wait.filter(|wait| !wait.is_zero());
                let asks = wait.map_or_else(String::new, |wait| {
                    format!(" and asks to wait for {} s", wait.as_secs())
                });
                let reason = format!("the server failed with status {status}{asks}");
                HubError::Broken { url, reason, tries }
            }
        }
    }

    /// Sleeps, but not through an interrupt.
    fn sleep(&self, pause: Duration) -> Result<(), HubError> {
        let mut left = pause;
        while !left.is_zero() {
            self.check_stop()?;
            let slice = left.min(SLICE);
            std::thread::sleep(slice);
            left = left.saturating_sub(slice);
        }
        self.check_stop()
    }
}
