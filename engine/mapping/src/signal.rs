//! SIGBUS inside our mappings: the list of live ranges, which a signal handler can walk, and the handler.
#![expect(unsafe_code, reason = "a signal handler is installed, and replaces pages")]

use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Mutex, OnceLock, PoisonError};

use rustix::mm::{self, MapFlags, ProtFlags};

/// Nothing is lost.
const NOTHING: usize = usize::MAX;

/// One range of the list. Nodes are never freed, for a handler may be walking; those of ranges that are
/// gone are used again, so that there are as many as were ever mapped at once.
#[derive(Debug)]
pub(crate) struct Node {
    /// Odd while the node is not in use or changes hands.
    version: AtomicUsize,
    start: AtomicUsize,
    end: AtomicUsize,
    /// Lowest lost byte, counted from `start`.
    lost: AtomicUsize,
    next: AtomicPtr<Node>,
}

/// The last node that was made.
static NODES: AtomicPtr<Node> = AtomicPtr::new(ptr::null_mut());
/// Held to change the list; a handler takes no lock.
static CHANGING: Mutex<()> = Mutex::new(());
static FAULTS: AtomicU64 = AtomicU64::new(0);
/// The size of a page, for the handler.
static PAGE: AtomicUsize = AtomicUsize::new(0);
/// Who handled SIGBUS before.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();
/// Whether the handler is in place; read and written with `CHANGING` held.
static IS_INSTALLED: AtomicBool = AtomicBool::new(false);

pub(crate) fn faults() -> u64 {
    FAULTS.load(SeqCst)
}

fn nodes() -> impl Iterator<Item = &'static Node> {
    let mut at = NODES.load(SeqCst);
    std::iter::from_fn(move || {
        // SAFETY: nodes come from `Box::leak` and are never freed.
        let node = unsafe { at.as_ref() }?;
        at = node.next.load(SeqCst);
        Some(node)
    })
}

/// Puts a range on the list.
pub(crate) fn register(start: usize, length: usize) -> &'static Node {
    let _changing = CHANGING.lock().unwrap_or_else(PoisonError::into_inner);
    let vacant = nodes().find(|node| node.version.load(SeqCst) % 2 == 1);
    let node = vacant.unwrap_or_else(|| {
        let node: &'static Node = Box::leak(Box::new(Node {
            version: AtomicUsize::new(1),
            start: AtomicUsize::new(0),
            end: AtomicUsize::new(0),
            lost: AtomicUsize::new(NOTHING),
            next: AtomicPtr::new(NODES.load(SeqCst)),
        }));
        NODES.store(ptr::from_ref(node).cast_mut(), SeqCst);
        node
    });
    node.start.store(start, SeqCst);
    node.end.store(start.saturating_add(length), SeqCst);
    node.lost.store(NOTHING, SeqCst);
    node.version.fetch_add(1, SeqCst);
    node
}

impl Node {
    /// Takes the range off the list.
    pub(crate) fn retire(&self) {
        let _changing = CHANGING.lock().unwrap_or_else(PoisonError::into_inner);
        self.version.fetch_add(1, SeqCst);
    }

    pub(crate) fn lost(&self) -> Option<usize> {
        Some(self.lost.load(SeqCst)).filter(|at| *at != NOTHING)
    }

    /// The range, if an address lies in it. A node that changes hands meanwhile is another's: whoever faults
    /// in a mapping borrows it, and its node does not change.
    fn range_around(&self, address: usize) -> Option<(usize, usize)> {
        let version = self.version.load(SeqCst);
        let (start, end) = (self.start.load(SeqCst), self.end.load(SeqCst));
        let is_settled = version.is_multiple_of(2) && self.version.load(SeqCst) == version;
        (is_settled && (start..end).contains(&address)).then_some((start, end))
    }

    /// Puts zeros from the page of `address` to the end of the range: whoever computes on them is told, and
    /// needs no further page. Only what is async-signal-safe: atomics and a system call.
    ///
    /// The loss is noted before the zeros are there, so that no other thread reads a zero of which
    /// [`faults`] and [`Node::lost`] do not know yet.
    fn cover(&self, address: usize, (start, end): (usize, usize)) -> bool {
        let page = address - address % PAGE.load(SeqCst).max(1);
        self.lost.fetch_min(page - start, SeqCst);
        FAULTS.fetch_add(1, SeqCst);
        let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
        // SAFETY: `page..end` are pages of a mapping of ours, which whoever faulted in it borrows, so that it
        // is neither unmapped nor another's meanwhile. They are only ever read, and stay readable.
        let covered = unsafe {
            mm::mmap_anonymous(
                ptr::without_provenance_mut(page),
                end - page,
                ProtFlags::READ,
                flags,
            )
        };
        covered.is_ok()
    }
}

/// Installs the handler, once.
pub(crate) fn install() -> io::Result<()> {
    let _changing = CHANGING.lock().unwrap_or_else(PoisonError::into_inner);
    if IS_INSTALLED.load(SeqCst) {
        return Ok(());
    }
    PAGE.store(rustix::param::page_size(), SeqCst);
    let mut before = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: the old action alone is asked for, and written where there is room for it.
    if unsafe { libc::sigaction(libc::SIGBUS, ptr::null(), before.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call above wrote it, and zeros are a valid action besides.
    let before = unsafe { before.assume_init() };
    let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = on_bus_error;
    let mut action = before;
    action.sa_sigaction = handler as libc::sighandler_t;
    // On the alternate stack, as the runtime's own: it looks for overflows of the other.
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
    // SAFETY: the set is a valid place to be written to.
    unsafe { libc::sigemptyset(&raw mut action.sa_mask) };
    // Known before the handler can ask for it; from an attempt that failed it may be there already.
    let _ = BEFORE.set(before);
    // SAFETY: the handler is async-signal-safe and has the signature that SA_SIGINFO asks for.
    if unsafe { libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    IS_INSTALLED.store(true, SeqCst);
    Ok(())
}

/// Covers what was lost of our mappings; everything else is passed on.
extern "C" fn on_bus_error(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    // SAFETY: with SA_SIGINFO the system hands over a valid record; of SIGBUS it has an address.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    // Codes up to 0 are signals that a process sent, whose records have no address.
    let ours = (code > 0)
        .then(|| nodes().find_map(|node| Some((node, node.range_around(address)?))))
        .flatten();
    if let Some((node, range)) = ours
        && node.cover(address, range)
    {
        return;
    }
    pass_on(signal, info, context);
}

/// What would have happened without us.
fn pass_on(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let before = BEFORE.get();
    let handler = before.map_or(libc::SIG_DFL, |action| action.sa_sigaction);
    // SAFETY: the record is the system's, see above.
    let code = unsafe { (*info).si_code };
    // Sent by a process, or word of broken memory that nobody has read yet: no instruction faulted.
    let is_sent = code <= 0 || code == libc::BUS_MCEERR_AO;
    match handler {
        libc::SIG_IGN if is_sent => {}
        // A fault cannot be ignored. With the default action back in place the instruction faults again
        // when this returns, and a signal that was sent is sent again.
        libc::SIG_DFL | libc::SIG_IGN => {
            // SAFETY: the default action of a signal may always be asked for; zeros are an empty mask.
            unsafe {
                let mut default: libc::sigaction = std::mem::zeroed();
                default.sa_sigaction = libc::SIG_DFL;
                libc::sigaction(signal, &raw const default, ptr::null_mut());
                if is_sent {
                    libc::raise(signal);
                }
            }
        }
        handler if before.is_some_and(|action| action.sa_flags & libc::SA_SIGINFO != 0) => {
            // SAFETY: whoever installed it with SA_SIGINFO gave a function of this signature.
            let handler = unsafe {
                std::mem::transmute::<
                    libc::sighandler_t,
                    extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void),
                >(handler)
            };
            handler(signal, info, context);
        }
        handler => {
            // SAFETY: whoever installed it without SA_SIGINFO gave a function of this signature.
            let handler = unsafe {
                std::mem::transmute::<libc::sighandler_t, extern "C" fn(libc::c_int)>(handler)
            };
            handler(signal);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_used_again_and_a_retired_range_is_nobodys() {
        // Addresses that nothing is ever mapped at.
        let first = register(0x1000, 0x2000);
        assert_eq!(first.range_around(0x2fff), Some((0x1000, 0x3000)));
        assert_eq!(first.range_around(0x3000), None);
        assert_eq!(first.lost(), None);
        first.lost.store(7, SeqCst);
        first.retire();
        assert_eq!(first.range_around(0x1000), None);
        let n_nodes = nodes().count();
        let second = register(0x5000, 0x1000);
        assert!(nodes().count() <= n_nodes.max(1) && second.lost().is_none());
        assert_eq!(second.range_around(0x5000), Some((0x5000, 0x6000)));
        second.retire();
    }
}
