//! A loaded model and one sequence: binds the plan's memory, then runs tokens through the layers.
//!
//! Owns the order of a layer and the position in the sequence. It executes the plan that it is
//! given: it probes no hardware and computes no budget.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;

use tierkeep_kernels::{Arithmetic, Isa, Kernels};
use tierkeep_plans::budget::{self, Line};
use tierkeep_plans::catalogue::Catalogue;
use tierkeep_plans::plan::{Abilities, Numerics, Plan};
use tierkeep_plans::spec::ArchSpec;
use tierkeep_plans::units::Bytes;

use crate::attention::{self, Small};
use crate::compute::{Batch, Compute, add, each_row};
use crate::counters::{Counters, Phase};
use crate::disk::{Disk, SystemDisk};
use crate::error::EngineError;
use crate::feed_forward::{self, ExpertLists, Experts, MAX_ACTIVE};
use crate::kv::KvCache;
use crate::memory::Account;
use crate::profile::{Profile, ProfileReport, Stage};
use crate::rope::Rope;
use crate::shard_io::{ReadCounter, ShardFiles};
use crate::store::Store;
use crate::support::supports;
use crate::threads::Threads;
use crate::weights::{DensePlan, FeedForwardWeights, RouterWeights, SwiGlu, Weights};
use crate::workspace::{AttentionBuffers, Workspace, rounded_bytes};

/// What this engine can execute beyond main memory, recency and pins.
pub const ABILITIES: Abilities = Abilities {
    vram: false,
    mapped_dense: tierkeep_mapping::IS_AVAILABLE,
    streamed_dense: true,
    sessions: false,
    frequency: false,
    prefetch: true,
};

/// What is being loaded, for a progress bar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loading {
    /// Dense weights.
    DenseWeights,
    /// Pinned experts.
    Pins,
}

/// Looks on while tokens run. Every method does nothing by default.
pub trait Observer {
    /// The residual stream after a decoder layer: `states (batch, hidden)`, the first row being
    /// that of position `first`. Breaking ends the call with [`EngineError::Interrupted`], and the
    /// batch is not part of the sequence: a layer of a large model takes long enough to be waited for.
    fn layer(&mut self, layer: usize, first: usize, states: &[f32]) -> ControlFlow<()> {
        let _ = (layer, first, states);
        ControlFlow::Continue(())
    }

    /// A batch is done; the sequence now has `len` tokens. Breaking ends the call with
    /// [`EngineError::Interrupted`] unless this was its last batch.
    fn batch(&mut self, len: usize) -> ControlFlow<()> {
        let _ = len;
        ControlFlow::Continue(())
    }

    /// Whether the logits of every position are wanted, not only of the last.
    fn wants_all_logits(&self) -> bool {
        false
    }

    /// Logits `(vocab)` of a position; called for each only if they are wanted.
    fn logits(&mut self, position: usize, logits: &[f32]) {
        let _ = (position, logits);
    }
}

/// Looks at nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unobserved;
impl Observer for Unobserved {}

/// A loaded model with the state of one sequence.
#[derive(Debug)]
pub struct Engine {
    spec: ArchSpec,
    kernels: Kernels,
    threads: Threads,
    files: Arc<ShardFiles>,
    weights: Weights,
    store: Store,
    rope: Rope,
    kv: KvCache,
    work: Workspace,
    lists: ExpertLists,
    profile: Profile,
    account: Account,
    counters: Counters,
    /// Experts of the last token of the last batch, `(expert layers, n_experts_active)`.
    routing: Vec<u32>,
    prefill_batch: usize,
}

impl Engine {
    /// Loads a model as the plan says; `progress(what, done, total)` in bytes.
    ///
    /// # Errors
    /// [`EngineError`]: this build does not run the model, the plan is for another model or contradicts itself, a shard cannot be
    /// read, memory is refused, or the machine lacks what the plan asks for.
    pub fn open(
        plan: &Plan,
        model: &Catalogue,
        progress: &mut dyn FnMut(Loading, u64, u64),
    ) -> Result<Self, EngineError> {
        Self::open_on(plan, model, Arc::new(SystemDisk), progress)
    }

    /// [`Engine::open`] with the model on another disk than the system's, so that a test can give one
    /// that fails.
    ///
    /// # Errors
    /// As [`Engine::open`].
    pub fn open_on(
        plan: &Plan,
        model: &Catalogue,
        disk: Arc<dyn Disk>,
        progress: &mut dyn FnMut(Loading, u64, u64),
    ) -> Result<Self, EngineError> {
        // An engine that this thread ran may have held it, and threads that read are to be held nowhere.
        tierkeep_kernels::release_current_thread();
        supports(model)?;
        plan.check(model)?;
        if let Some(&need) = plan.needs_beyond(&ABILITIES).first() {
            return Err(EngineError::Lacking { need, remedy: need.remedy() });
        }
        let spec = model.spec.clone();
        let n_active = spec.router.n_experts_active;
        if n_active > MAX_ACTIVE {
            return Err(EngineError::TooManyActive { found: n_active, cap: MAX_ACTIVE });
        }
        let arithmetic = match plan.engine.numerics {
            Numerics::Exact => Arithmetic::Exact,
            Numerics::Fast => Arithmetic::Fast,
        };
        let kernels = Kernels::new(plan.engine.isa.parse::<Isa>()?)?.with(arithmetic);
        let threads = plan.engine.threads as usize;
        let mut account = Account::new(&plan.ledger);
        let io = plan.engine.io;
        let how = plan.reads();
        let n_bounces = budget::n_bounces(how);
        let bounces = (0..n_bounces)
            .map(|_| account.committed(Line::IoBuffers, budget::bounce_bytes(io) / n_bounces))
            .collect::<Result<Vec<_>, _>>()?;
        let files = Arc::new(ShardFiles::open(disk, &model.shards, (io, how), bounces)?);
        let context = plan.request.context as usize;
        let prefill_batch = plan.engine.prefill_batch as usize;
        let work = Workspace::new(&spec, prefill_batch, context, threads, &mut account)?;
        let kv = KvCache::new(&spec, context, plan.engine.kv, &mut account)?;
        let weights = Weights::load(
            model,
            DensePlan {
                embedding: plan.engine.embedding,
                residency: plan.placement.dense,
                streamed: &plan.placement.streamed,
            },
            &mut account,
            &files,
            &mut |done, total| progress(Loading::DenseWeights, done, total),
        )?;
        let n_lanes = how.depth as usize;
        let store = Store::open(
            model,
            (&plan.placement.slots, n_lanes),
            &mut account,
            &files,
            &mut |done, total| progress(Loading::Pins, done, total),
        )?;
        // After the threads that read, which are not to be held anywhere.
        let threads = Threads::start(threads, &plan.engine.cpus)?;
        if let Some((vectors, cols)) = rounded_bytes(&spec, plan.engine.numerics, prefill_batch) {
            let bytes =
                tierkeep_kernels::reserved_bytes(threads.pool.threads(), vectors, cols) as u64;
            account.bind_elsewhere(Line::Activations, bytes)?;
            threads.pool.reserve(vectors, cols);
        }
        Ok(Self {
            rope: Rope::new(&spec.rope),
            lists: ExpertLists::new(&spec, prefill_batch),
            profile: Profile::default(),
            counters: Counters::new(spec.n_layers, spec.router.n_experts),
            routing: vec![0; spec.expert_layers().count() * n_active],
            spec,
            kernels,
            threads,
            files,
            weights,
            store,
            kv,
            work,
            account,
            prefill_batch,
        })
    }

    /// Runs tokens after those already there, in batches of at most the planned size.
    ///
    /// Afterwards [`Engine::logits`] holds the logits after the last one. On an error the tokens
    /// of the batch that failed are not part of the sequence; where they had entered a full sliding window,
    /// the sequence cannot go on ([`EngineError::WindowLost`]) until [`Engine::clear`].
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn run(
        &mut self,
        tokens: &[u32],
        phase: Phase,
        observer: &mut dyn Observer,
    ) -> Result<(), EngineError> {
        if tokens.is_empty() {
            return Err(EngineError::Empty);
        }
        if self.kv.is_lost {
            return Err(EngineError::WindowLost);
        }
        let wanted = self.kv.len + tokens.len();
        if wanted > self.kv.context {
            return Err(EngineError::ContextFull { wanted, context: self.kv.context });
        }
        self.threads.enter();
        self.profile.enter(phase, tokens.len());
        let vocab_size = self.spec.vocab_size;
        if let Some(&token) = tokens.iter().find(|&&t| t as usize >= vocab_size) {
            return Err(EngineError::UnknownToken { token, vocab_size });
        }
        for (batch, last) in tokens
            .chunks(self.prefill_batch)
            .zip((1..=tokens.len().div_ceil(self.prefill_batch)).rev().map(|left| left == 1))
        {
            if let Err(error) = self.batch(batch, (wanted, last), phase, observer) {
                self.kv.abandon(batch.len());
                self.store.recover();
                self.lists.window.recover();
                self.weights.recover();
                return Err(error);
            }
        }
        Ok(())
    }

    /// One batch through all layers.
    fn batch(
        &mut self,
        tokens: &[u32],
        (row_len, is_last): (usize, bool),
        phase: Phase,
        observer: &mut dyn Observer,
    ) -> Result<(), EngineError> {
        let hidden = self.spec.hidden_size;
        let batch = Batch { len: tokens.len(), first: self.kv.len, row_len };
        let rows = self.work.states[..tokens.len() * hidden].chunks_exact_mut(hidden);
        for (token, row) in tokens.iter().zip(rows) {
            self.weights.embed(self.kernels, &self.files, *token, row)?;
        }
        let (rope, dim) = (&self.rope, self.rope.dim());
        let rotation = &mut self.work.rotation[..tokens.len() * dim];
        each_row(&self.threads.pool, rotation, dim, |token, row| {
            rope.angles(batch.first + token, row);
        });
        self.profile.lap(Stage::Embed);
        let all_logits = observer.wants_all_logits();
        self.weights.begin(if all_logits { batch.len } else { usize::from(is_last) });
        let mut expert_layer = 0;
        for layer in 0..self.spec.n_layers {
            self.layer(layer, batch, phase)?;
            // Before anyone looks at what may have been computed on zeros.
            self.weights.check_pages(&self.files)?;
            self.profile.lap(Stage::Norms);
            let states = &self.work.states[..batch.len * hidden];
            if observer.layer(layer, batch.first, states).is_break() {
                return Err(EngineError::Interrupted);
            }
            if self.spec.is_expert_layer(layer) {
                let k = self.spec.router.n_experts_active;
                let last = &self.work.chosen[(batch.len - 1) * k..batch.len * k];
                self.routing[expert_layer * k..(expert_layer + 1) * k].copy_from_slice(last);
                expert_layer += 1;
            }
        }
        if all_logits {
            for token in 0..batch.len {
                self.head(token)?;
                observer.logits(batch.first + token, &self.work.logits);
            }
        } else if is_last {
            self.head(batch.len - 1)?;
        }
        self.profile.lap(Stage::Head);
        self.kv.len += batch.len;
        match observer.batch(self.kv.len) {
            ControlFlow::Break(()) if !is_last => Err(EngineError::Interrupted),
            _ => Ok(()),
        }
    }

    /// One decoder layer.
    ///
    /// A layer with a shortcut is two: its experts take the state of the first and are added after the
    /// second (LongCat-Flash, section 2.1). Their routing is known a sub-block before they are needed.
    fn layer(&mut self, layer: usize, batch: Batch, phase: Phase) -> Result<(), EngineError> {
        self.weights.enter(layer, 0)?;
        self.profile.lap(Stage::Lookup);
        self.attend(layer, 0, batch)?;
        match self.weights.layers[layer].feed_forward {
            FeedForwardWeights::Dense(dense) => self.dense(&dense, batch)?,
            FeedForwardWeights::Experts { router, shared } => {
                self.route(layer, &router, batch, phase)?;
                self.experts(layer, shared.as_ref(), batch, phase)?;
            }
            FeedForwardWeights::Shortcut { router, dense: [first, second] } => {
                self.route(layer, &router, batch, phase)?;
                self.work.keep_normed(batch.len * self.spec.hidden_size);
                self.dense(&first, batch)?;
                self.weights.enter(layer, 1)?;
                self.profile.lap(Stage::Lookup);
                self.attend(layer, 1, batch)?;
                self.dense(&second, batch)?;
                self.work.restore_normed();
                self.experts(layer, None, batch, phase)?;
            }
        }
        Ok(())
    }

    /// Attention of a sub-block behind its norm, added to the stream; the norm of what comes of it is left
    /// in `normed`.
    fn attend(&mut self, layer: usize, block: usize, batch: Batch) -> Result<(), EngineError> {
        let n = batch.len * self.spec.hidden_size;
        let compute = Compute {
            kernels: self.kernels,
            pool: &self.threads.pool,
            weights: &self.weights,
            rope: &self.rope,
            profile: &self.profile,
        };
        let weights = &self.weights.layers[layer].blocks[block];
        let eps = self.spec.norm_eps;
        let Workspace { states, normed, block: out, norm, rotation, attention, .. } =
            &mut self.work;
        compute.rms_norm(weights.input_norm, eps, &states[..n], &mut normed[..n], norm)?;
        compute.profile.lap(Stage::Norms);
        let heads = attention::attend(
            compute,
            (&self.spec.attention, &weights.attention),
            batch,
            &normed[..n],
            self.kv.cache(layer, block),
            attention,
            &mut Small { norm, rotation },
        )?;
        compute.product(weights.attention_output, heads, batch.len, &mut out[..n])?;
        compute.add_bias(weights.attention_output_bias, &mut out[..n], norm)?;
        compute.profile.lap(Stage::Projections);
        add(compute.pool, &mut states[..n], &out[..n], self.spec.hidden_size);
        let post = weights.post_attention_norm;
        compute.rms_norm(post, eps, &states[..n], &mut normed[..n], norm)?;
        compute.profile.lap(Stage::Norms);
        Ok(())
    }

    /// A dense feed-forward on `normed`, added to the stream.
    fn dense(&mut self, weights: &SwiGlu, batch: Batch) -> Result<(), EngineError> {
        let compute = Compute {
            kernels: self.kernels,
            pool: &self.threads.pool,
            weights: &self.weights,
            rope: &self.rope,
            profile: &self.profile,
        };
        feed_forward::dense(compute, weights, batch, &self.spec, &mut self.work)?;
        self.work.add_block(&self.threads.pool, batch.len, self.spec.hidden_size);
        self.profile.lap(Stage::Dense);
        Ok(())
    }

    /// Chooses the experts of each token by `normed`. From here on they are known, and those that are missing
    /// are read, where the plan has it so.
    fn route(
        &mut self,
        layer: usize,
        router: &RouterWeights,
        batch: Batch,
        phase: Phase,
    ) -> Result<(), EngineError> {
        let (compute, mut experts, work) = self.with_experts(layer, phase);
        feed_forward::choose(compute, router, batch, experts.spec, work)?;
        compute.profile.lap(Stage::Router);
        if !experts.files.how().begins_early {
            // They are asked for next, or it is not wanted.
            return Ok(());
        }
        let n_chosen = batch.len * experts.spec.router.n_experts_active;
        experts.begin(&work.chosen[..n_chosen], batch.len)
    }

    /// The chosen experts and the shared ones on `normed`, added to the stream.
    fn experts(
        &mut self,
        layer: usize,
        shared: Option<&SwiGlu>,
        batch: Batch,
        phase: Phase,
    ) -> Result<(), EngineError> {
        let (compute, mut experts, work) = self.with_experts(layer, phase);
        feed_forward::experts(compute, shared, batch, &mut experts, work)?;
        work.add_block(compute.pool, batch.len, experts.spec.hidden_size);
        compute.profile.lap(Stage::Experts);
        Ok(())
    }

    /// What the experts of a layer are computed with, where they come from, and the buffers.
    fn with_experts(
        &mut self,
        layer: usize,
        phase: Phase,
    ) -> (Compute<'_>, Experts<'_>, &mut Workspace) {
        let compute = Compute {
            kernels: self.kernels,
            pool: &self.threads.pool,
            weights: &self.weights,
            rope: &self.rope,
            profile: &self.profile,
        };
        let experts = Experts {
            spec: &self.spec,
            store: &mut self.store,
            files: &self.files,
            lists: &mut self.lists,
            counts: self.counters.layer(phase, layer),
            layer,
        };
        (compute, experts, &mut self.work)
    }

    /// Final norm and head for one token of the batch.
    fn head(&mut self, token: usize) -> Result<(), EngineError> {
        let hidden = self.spec.hidden_size;
        let Workspace { states, normed, norm, logits, .. } = &mut self.work;
        let state = &states[token * hidden..(token + 1) * hidden];
        let normed = &mut normed[..hidden];
        let eps = self.spec.norm_eps;
        let mut at = 0;
        while let Some(piece) = self.weights.enter_head(at)? {
            let compute = Compute {
                kernels: self.kernels,
                pool: &self.threads.pool,
                weights: &self.weights,
                rope: &self.rope,
                profile: &self.profile,
            };
            if at == 0 {
                compute.rms_norm(self.weights.final_norm, eps, state, normed, norm)?;
            }
            compute.product(piece.weight, normed, 1, &mut logits[piece.rows])?;
            at += 1;
        }
        // Before anyone looks at logits that may have been computed on something else than the model.
        self.weights.check_pages(&self.files)?;
        self.weights.check_files(&self.files)
    }

    /// Logits `(vocab)` after the last token that was run.
    #[must_use]
    pub fn logits(&self) -> &[f32] {
        &self.work.logits
    }

    /// Experts of the last token that was run: `n_experts_active` for each layer that routes, in
    /// descending router weight; ids from `n_experts` on are experts without weights, which no store has. After a call that failed, of no one token.
    #[must_use]
    pub fn last_routing(&self) -> &[u32] {
        &self.routing
    }

    /// Tokens in the sequence.
    #[must_use]
    pub fn len(&self) -> usize {
        self.kv.len
    }

    /// Whether the sequence has no tokens.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.kv.len == 0
    }

    /// Forgets the sequence; experts stay where they are.
    pub fn clear(&mut self) {
        self.kv.clear();
    }

    /// Tokens that the sequence may hold.
    #[must_use]
    pub fn context(&self) -> usize {
        self.kv.context
    }

    /// Most tokens of one prefill batch.
    #[must_use]
    pub fn prefill_batch(&self) -> usize {
        self.prefill_batch
    }

    /// The architecture that runs.
    #[must_use]
    pub fn spec(&self) -> &ArchSpec {
        &self.spec
    }

    /// Accesses to routed experts so far.
    #[must_use]
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Begins to count accesses anew; experts stay where they are.
    pub fn restart_counters(&mut self) {
        self.counters.clear();
    }

    /// Slots that hold no expert yet, with their bytes: memory that is bound and that nothing has been
    /// written to. Goes through every slot.
    #[must_use]
    pub fn empty_slots(&self) -> (u64, Bytes) {
        let (slots, bytes) = self.store.empty_slots();
        (slots, Bytes(bytes))
    }

    /// Selections of the sparse indexer that a tie decided, so far. Such a selection depends on how
    /// many tokens one call of [`Engine::run`] was given, as it does in the reference.
    #[must_use]
    pub fn selection_ties(&self) -> u64 {
        match &self.work.attention {
            AttentionBuffers::Latent(buffers) => buffers.indexer.as_ref().map_or(0, |i| i.ties),
            AttentionBuffers::Grouped(_) => 0,
        }
    }

    /// How much has been read from shards, loading included.
    #[must_use]
    pub fn read_counter(&self) -> ReadCounter {
        self.files.counter().clone()
    }

    /// Shards whose path leads to another file by now, or to none, because they were replaced while the
    /// engine worked. It went on with the files that it had opened: its tokens are theirs.
    #[must_use]
    pub fn replaced_shards(&self) -> Vec<PathBuf> {
        self.files.replaced()
    }

    /// Begins to measure where time goes, from nothing, or stops.
    pub fn set_profile(&mut self, is_on: bool) {
        self.profile.set(is_on);
    }

    /// Where time went since [`Engine::set_profile`], up to the end of the last pass; `None` where nothing was
    /// measured.
    #[must_use]
    pub fn profile(&self) -> Option<ProfileReport> {
        self.profile.report()
    }

    /// Why threads do not run on the processors that the plan holds them to; `None` where they do, or are not
    /// held anywhere. It changes speed alone.
    #[must_use]
    pub fn threads_refused(&self) -> Option<&str> {
        self.threads.refused()
    }

    /// Bytes bound against a line, counted where they were allocated.
    #[must_use]
    pub fn bound(&self, line: Line) -> Bytes {
        self.account.bound(line)
    }
}
