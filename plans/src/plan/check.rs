//! Whether an edited or an old plan still makes sense for a model: every value in range, every sum
//! as `budget` computes it. Decides nothing and changes nothing but what follows from the rest.

use super::{ExpertTier, Plan, PlanError, Policy, Prediction, Prefetch, Range, TierShare};
use crate::budget::{
    self, CardLine, CardPlacement, EmbeddingResidency, Holding, Line, ModelBytes, Reads, Slots,
    Workload,
};
use crate::catalogue::{Catalogue, DIRECT_ALIGN};
use crate::planner::{MAX_READ_DEPTH, MAX_SESSIONS, MAX_THREADS};
use crate::spec::ArchSpec;
use crate::units::Bytes;

/// What the engine calls its instruction sets.
const ISAS: [&str; 3] = ["scalar", "avx2", "avx512"];

impl Plan {
    /// What the engine is asked for.
    #[must_use]
    pub fn workload(&self) -> Workload {
        Workload {
            context: self.request.context,
            prefill_batch: self.engine.prefill_batch,
            threads: self.engine.threads,
            numerics: self.engine.numerics,
            kv: self.engine.kv,
            embedding: self.engine.embedding,
            sessions: self.request.sessions,
            reads: self.reads(),
        }
    }

    /// How reads are made.
    #[must_use]
    pub fn reads(&self) -> Reads {
        Reads {
            depth: self.engine.read_depth,
            bytes: self.engine.read_bytes,
            begins_early: self.engine.prefetch == Prefetch::Exact,
        }
    }

    /// Where everything lives.
    #[must_use]
    pub fn holding(&self) -> Holding<'_> {
        Holding {
            slots: &self.placement.slots,
            dense: self.placement.dense,
            streamed: &self.placement.streamed,
            page_cache_bytes: self.placement.page_cache_bytes,
            cards: &self.placement.cards,
        }
    }

    /// Brings ledgers, what is unused and the sizes of tiers in line with settings and placement after
    /// these were changed. Budget and prediction stay.
    pub fn settle(&mut self, model: &Catalogue) {
        let sums = ModelBytes::of(model, self.engine.io);
        let workload = self.workload();
        for card in &mut self.placement.cards {
            card.ledger = budget::card_ledger(&sums, &workload, card);
            card.unused_bytes = card.budget_bytes.saturating_sub(card.ledger.total());
        }
        self.ledger = budget::host_ledger(&sums, &workload, &self.holding());
        self.unused_bytes = self.request.budget_bytes.saturating_sub(self.ledger.total());
        let shares: Vec<f64> = ExpertTier::ALL.map(|tier| self.access_share(tier)).into();
        self.tiers = tiers(&sums, &self.holding());
        for (tier, share) in self.tiers.iter_mut().zip(shares) {
            tier.access_share = share;
        }
    }

    /// Share of accesses that a tier is expected to serve.
    #[must_use]
    pub fn access_share(&self, tier: ExpertTier) -> f64 {
        self.tiers.iter().find(|t| t.tier == tier).map_or(0.0, |t| t.access_share)
    }

    /// Whether the plan makes sense for `model`: same fingerprint, every value in range, and a
    /// ledger that is what `budget` computes from the settings and is within the budget.
    ///
    /// # Errors
    /// [`PlanError`], naming the first thing that is wrong.
    pub fn check(&self, model: &Catalogue) -> Result<(), PlanError> {
        if self.model.fingerprint != model.fingerprint {
            return Err(PlanError::OtherModel {
                planned: self.model.fingerprint.clone(),
                directory: model.directory.clone(),
                found: model.fingerprint.clone(),
            });
        }
        self.check_model(model)?;
        self.check_budget()?;
        self.check_settings(model)?;
        self.check_slots(model)?;
        self.check_streamed(model)?;
        for card in &self.placement.cards {
            self.check_card(&model.spec, card)?;
        }
        self.check_copies(&model.spec)?;
        self.check_prediction()?;
        let sums = ModelBytes::of(model, self.engine.io);
        self.check_ledger(&sums)?;
        self.check_card_ledgers(&sums)?;
        self.check_tiers(&sums)
    }

    fn check_model(&self, model: &Catalogue) -> Result<(), PlanError> {
        let family = model.spec.family.model_type();
        if self.model.family != family {
            return Err(invalid("model.family", &self.model.family, family));
        }
        let bytes = model.total_bytes().0;
        in_range("model.total_bytes", self.model.total_bytes.0, bytes, bytes)
    }

    /// A budget that was raised by hand is held to the machine that the plan was made on.
    fn check_budget(&self) -> Result<(), PlanError> {
        let budget = self.request.budget_bytes.0;
        match self.machine.memory.usable_bytes.value() {
            Some(&available) if budget > available && !self.request.allow_overcommit => {
                Err(invalid(
                    "request.budget_bytes",
                    budget.to_string(),
                    format!(
                        "at most the {available} that its machine has, or allow_overcommit = true"
                    ),
                ))
            }
            _ => Ok(()),
        }
    }

    fn check_prediction(&self) -> Result<(), PlanError> {
        let Prediction { decode_tokens_per_s, hit_rate, calibration, .. } = &self.prediction;
        ascending("prediction.decode_tokens_per_s", *decode_tokens_per_s, f64::MAX)?;
        ascending("prediction.hit_rate", *hit_rate, 1.0)?;
        if !(*calibration > 0.0 && calibration.is_finite()) {
            let found = calibration.to_string();
            return Err(invalid("prediction.calibration", found, "a positive number"));
        }
        let hidden = self.prediction.hidden_read_seconds;
        if hidden >= 0.0 && hidden.is_finite() {
            return Ok(());
        }
        Err(invalid("prediction.hidden_read_seconds", hidden.to_string(), "at least 0"))
    }

    fn check_settings(&self, model: &Catalogue) -> Result<(), PlanError> {
        let max_context = model.spec.max_context as u64;
        in_range("request.context", self.request.context, 1, max_context)?;
        in_range("request.sessions", self.request.sessions, 1, MAX_SESSIONS)?;
        in_range("engine.threads", self.engine.threads, 1, MAX_THREADS)?;
        self.check_cpus()?;
        if !ISAS.contains(&self.engine.isa.as_str()) {
            let expected = format!("one of {}", ISAS.join(", "));
            return Err(invalid("engine.isa", format!("{:?}", self.engine.isa), expected));
        }
        in_range("engine.prefill_batch", self.engine.prefill_batch, 1, self.request.context)?;
        self.check_reads(&model.spec)?;
        match (self.engine.embedding, self.placement.streamed.head) {
            _ if !model.spec.tied_embeddings => Ok(()),
            (EmbeddingResidency::Resident, false) | (EmbeddingResidency::RowRead, true) => Ok(()),
            (EmbeddingResidency::RowRead, false) => {
                let expected = "resident, for the head shares its weights";
                Err(invalid("engine.embedding", "row_read", expected))
            }
            (EmbeddingResidency::Resident, true) => {
                let expected = "row_read, for the head shares its weights and is streamed";
                Err(invalid("engine.embedding", "resident", expected))
            }
        }
    }

    /// A processor for each thread, all different, or none at all.
    fn check_cpus(&self) -> Result<(), PlanError> {
        let mut cpus = self.engine.cpus.clone();
        cpus.sort_unstable();
        cpus.dedup();
        if self.engine.cpus.is_empty() || cpus.len() as u64 == self.engine.threads {
            return Ok(());
        }
        let expected =
            format!("none, or {} different processors, one a thread", self.engine.threads);
        Err(invalid("engine.cpus", format!("{:?}", self.engine.cpus), expected))
    }

    fn check_reads(&self, spec: &ArchSpec) -> Result<(), PlanError> {
        let engine = &self.engine;
        let least = match engine.prefetch {
            Prefetch::Off => 0,
            Prefetch::Exact if spec.has_window() => 1,
            Prefetch::Exact => {
                let expected = "off, for no layer of this model knows its experts early";
                return Err(invalid("engine.prefetch", "exact", expected));
            }
        };
        in_range("engine.read_depth", engine.read_depth, least, MAX_READ_DEPTH)?;
        match engine.read_bytes {
            Some(Bytes(bytes)) if bytes == 0 || !bytes.is_multiple_of(DIRECT_ALIGN) => {
                let expected = format!("a positive multiple of {DIRECT_ALIGN}, or no such field");
                Err(invalid("engine.read_bytes", bytes.to_string(), expected))
            }
            Some(_) | None => Ok(()),
        }
    }

    fn check_slots(&self, model: &Catalogue) -> Result<(), PlanError> {
        let spec = &model.spec;
        let Slots { caps, pins } = &self.placement.slots;
        for (field, len) in [("caps", caps.len()), ("pins", pins.len())] {
            if len != spec.n_layers {
                return Err(invalid(
                    format!("placement.slots.{field}"),
                    format!("a list of {len}"),
                    format!("one entry for each of the {} layers", spec.n_layers),
                ));
            }
        }
        for (layer, (&cap, pins)) in caps.iter().zip(pins).enumerate() {
            let n_experts = if spec.is_expert_layer(layer) { spec.router.n_experts } else { 0 };
            in_range(
                &format!("placement.slots.caps[{layer}]"),
                u64::from(cap),
                0,
                n_experts as u64,
            )?;
            let ascending = pins.windows(2).all(|w| w[0] < w[1]);
            let known = pins.last().is_none_or(|&last| (last as usize) < n_experts);
            if !ascending || !known || pins.len() > cap as usize {
                return Err(invalid(
                    format!("placement.slots.pins[{layer}]"),
                    format!("{pins:?}"),
                    format!("at most {cap} different experts below {n_experts}, ascending"),
                ));
            }
        }
        Ok(())
    }

    /// Under static every slot is a pin; streamed layers exist, ascending, and are on no card.
    fn check_streamed(&self, model: &Catalogue) -> Result<(), PlanError> {
        let spec = &model.spec;
        let Slots { caps, pins } = &self.placement.slots;
        let is_static = self.placement.policy == Policy::Static;
        if let Some(layer) =
            (0..spec.n_layers).find(|&l| is_static && pins[l].len() != caps[l] as usize)
        {
            return Err(invalid(
                format!("placement.slots.pins[{layer}]"),
                format!("{} pins", pins[layer].len()),
                format!("{}: under the policy static every slot is a pin", caps[layer]),
            ));
        }
        let streamed = &self.placement.streamed;
        let field = "placement.streamed.layers";
        let ascending = streamed.layers.windows(2).all(|w| w[0] < w[1]);
        let known = streamed.layers.last().is_none_or(|&l| (l as usize) < spec.n_layers);
        if !ascending || !known {
            let expected = format!("different layers below {}, ascending", spec.n_layers);
            return Err(invalid(field, format!("{:?}", streamed.layers), expected));
        }
        let on_card = |layer: u32| {
            self.placement.cards.iter().any(|c| c.layers().contains(&(layer as usize)))
        };
        if let Some(layer) = streamed.layers.iter().find(|&&l| on_card(l)) {
            return Err(invalid(field, layer.to_string(), "layers that are on no graphics card"));
        }
        if streamed.head && streamed.layers.is_empty() {
            let expected = "false while no layer is streamed: it passes through their buffers";
            return Err(invalid("placement.streamed.head", "true", expected));
        }
        Ok(())
    }

    fn check_card(&self, spec: &ArchSpec, card: &CardPlacement) -> Result<(), PlanError> {
        let field = |name: &str| format!("placement.cards[{}].{name}", card.card);
        let n_layers = spec.n_layers as u64;
        in_range(&field("first_layer"), u64::from(card.first_layer), 0, n_layers)?;
        let first = u64::from(card.first_layer);
        in_range(&field("end_layer"), u64::from(card.end_layer), first, n_layers)?;
        let ascending = card.experts.windows(2).all(|w| w[0].layer < w[1].layer);
        if !ascending {
            return Err(invalid(field("experts"), "layers out of order", "ascending layers"));
        }
        for layer in &card.experts {
            let routes = (layer.layer as usize) < spec.n_layers
                && spec.is_expert_layer(layer.layer as usize);
            let n_experts = if routes { spec.router.n_experts } else { 0 };
            if layer.experts.0.last().is_some_and(|&last| last as usize >= n_experts) {
                return Err(invalid(
                    field("experts"),
                    format!("layer {} experts {}", layer.layer, layer.experts),
                    format!("experts below {n_experts}"),
                ));
            }
        }
        Ok(())
    }

    /// No layer, head or expert is in two places.
    fn check_copies(&self, spec: &ArchSpec) -> Result<(), PlanError> {
        let cards = &self.placement.cards;
        let mut numbers: Vec<u32> = cards.iter().map(|c| c.card).collect();
        numbers.sort_unstable();
        if numbers.windows(2).any(|w| w[0] == w[1]) {
            return Err(invalid("placement.cards", format!("{numbers:?}"), "each card once"));
        }
        if cards.iter().filter(|c| c.head).count() + usize::from(self.placement.streamed.head) > 1 {
            return Err(invalid("placement.cards", "the head in two places", "one place"));
        }
        let mut layer_on = vec![None; spec.n_layers];
        let mut expert_on = vec![vec![None; spec.router.n_experts]; spec.n_layers];
        let twice = |what: String, first: &str, second: &str| {
            Err(invalid(what, format!("on {first} and {second}"), "one copy"))
        };
        for (layer, pins) in self.placement.slots.pins.iter().enumerate() {
            for &pin in pins {
                expert_on[layer][pin as usize] = Some("main memory".to_owned());
            }
        }
        for card in cards {
            let name = format!("card {}", card.card);
            for layer in card.layers() {
                if let Some(first) = layer_on[layer].replace(name.clone()) {
                    return twice(format!("layer {layer}"), &first, &name);
                }
            }
            for LayerPlace { layer, expert } in places(card) {
                if let Some(first) = expert_on[layer][expert].replace(name.clone()) {
                    return twice(format!("expert {layer}:{expert}"), &first, &name);
                }
            }
        }
        let on_cards = self.holding().on_cards(spec.n_layers);
        for (layer, (&cap, &on_cards)) in
            self.placement.slots.caps.iter().zip(&on_cards).enumerate()
        {
            let n_experts =
                if spec.is_expert_layer(layer) { spec.router.n_experts as u64 } else { 0 };
            let most = n_experts.saturating_sub(u64::from(on_cards));
            in_range(&format!("placement.slots.caps[{layer}]"), u64::from(cap), 0, most)?;
        }
        Ok(())
    }

    fn check_ledger(&self, sums: &ModelBytes<'_>) -> Result<(), PlanError> {
        let expected = budget::host_ledger(sums, &self.workload(), &self.holding());
        for line in Line::ALL {
            let (found, expected) = (self.ledger.bytes(line).0, expected.bytes(line).0);
            if found != expected {
                return Err(PlanError::LedgerMismatch { line, found, expected });
            }
        }
        let (total, budget) = (self.ledger.total(), self.request.budget_bytes);
        if total > budget {
            return Err(PlanError::OverBudget { total, budget });
        }
        let unused = budget.saturating_sub(total).0;
        in_range("unused_bytes", self.unused_bytes.0, unused, unused)
    }

    fn check_card_ledgers(&self, sums: &ModelBytes<'_>) -> Result<(), PlanError> {
        let mut together = Bytes(0);
        for card in &self.placement.cards {
            let expected = budget::card_ledger(sums, &self.workload(), card);
            for line in CardLine::ALL {
                let (found, expected) = (card.ledger.bytes(line).0, expected.bytes(line).0);
                if found != expected {
                    let card = card.card;
                    return Err(PlanError::CardLedgerMismatch { card, line, found, expected });
                }
            }
            let (total, budget) = (card.ledger.total(), card.budget_bytes);
            if total > budget {
                return Err(PlanError::OverCardBudget { card: card.card, total, budget });
            }
            let unused = budget.saturating_sub(total).0;
            let field = format!("placement.cards[{}].unused_bytes", card.card);
            in_range(&field, card.unused_bytes.0, unused, unused)?;
            together = together + budget;
        }
        if together > self.request.vram_bytes {
            return Err(invalid(
                "request.vram_bytes",
                self.request.vram_bytes.0.to_string(),
                format!("at least the {} of the cards' budgets", together.0),
            ));
        }
        Ok(())
    }

    fn check_tiers(&self, sums: &ModelBytes<'_>) -> Result<(), PlanError> {
        let expected = tiers(sums, &self.holding());
        if self.tiers.len() != expected.len() {
            let found = format!("a list of {}", self.tiers.len());
            return Err(invalid("tiers", found, format!("all {} tiers", expected.len())));
        }
        for (tier, expected) in self.tiers.iter().zip(expected) {
            let name = format!("tiers.{}", expected.tier.name());
            if tier.tier != expected.tier {
                return Err(invalid("tiers", tier.tier.name(), expected.tier.name()));
            }
            in_range(
                &(name.clone() + ".experts"),
                tier.experts,
                expected.experts,
                expected.experts,
            )?;
            in_range(&(name.clone() + ".bytes"), tier.bytes.0, expected.bytes.0, expected.bytes.0)?;
            if !(0.0..=1.0).contains(&tier.access_share) {
                let found = tier.access_share.to_string();
                return Err(invalid(name + ".access_share", found, "0 to 1"));
            }
        }
        Ok(())
    }
}

/// A routed expert of a card.
struct LayerPlace {
    layer: usize,
    expert: usize,
}

fn places(card: &CardPlacement) -> impl Iterator<Item = LayerPlace> + '_ {
    card.experts.iter().flat_map(|l| {
        l.experts.0.iter().map(|&e| LayerPlace { layer: l.layer as usize, expert: e as usize })
    })
}

/// How many routed experts each tier can hold and how large they are; shares of accesses are not
/// known here.
#[must_use]
pub(crate) fn tiers(sums: &ModelBytes<'_>, holding: &Holding<'_>) -> Vec<TierShare> {
    let on_cards = holding.on_cards(sums.layers.len());
    let mut held = [(0_u64, 0_u64); 5];
    let mut add = |tier: ExpertTier, experts: u64, each: u64| {
        let sum = &mut held[tier as usize];
        sum.0 = sum.0.saturating_add(experts);
        sum.1 = sum.1.saturating_add(experts.saturating_mul(each));
    };
    for (layer, bytes) in sums.layers.iter().enumerate() {
        let cap = u64::from(holding.slots.caps.get(layer).copied().unwrap_or(0));
        let pins = holding.slots.pins.get(layer).map_or(0, Vec::len) as u64;
        let on_cards = u64::from(on_cards[layer]);
        add(ExpertTier::Vram, on_cards, bytes.slot);
        add(ExpertTier::Pinned, pins, bytes.slot);
        add(ExpertTier::Cache, cap.saturating_sub(pins), bytes.slot);
        let elsewhere = u64::from(bytes.n_experts).saturating_sub(on_cards + cap);
        add(ExpertTier::Disk, elsewhere, bytes.expert_read);
    }
    let mean = sums.largest_slot.max(1);
    let kept = (holding.page_cache_bytes.0 / mean).min(held[ExpertTier::Disk as usize].0);
    held[ExpertTier::PageCache as usize] = (kept, kept.saturating_mul(mean));
    let disk = &mut held[ExpertTier::Disk as usize];
    *disk = (disk.0 - kept, disk.1.saturating_sub(kept.saturating_mul(mean)));
    let share = |(tier, (experts, bytes))| TierShare {
        tier,
        experts,
        bytes: Bytes(bytes),
        access_share: 0.0,
    };
    ExpertTier::ALL.into_iter().zip(held).map(share).collect()
}

fn invalid(
    field: impl Into<String>,
    found: impl Into<String>,
    expected: impl Into<String>,
) -> PlanError {
    PlanError::Invalid { field: field.into(), found: found.into(), expected: expected.into() }
}

fn in_range(field: &str, found: u64, min: u64, max: u64) -> Result<(), PlanError> {
    if (min..=max).contains(&found) {
        return Ok(());
    }
    let expected = if min == max { min.to_string() } else { format!("{min} to {max}") };
    Err(invalid(field, found.to_string(), expected))
}

/// Whether a range is one: numbers from 0 to `max`, none below the one before it.
fn ascending(field: &str, range: Range, max: f64) -> Result<(), PlanError> {
    let Range { p10, p50, p90 } = range;
    if 0.0 <= p10 && p10 <= p50 && p50 <= p90 && p90 <= max {
        return Ok(());
    }
    let expected = if max < f64::MAX {
        format!("ascending numbers from 0 to {max}")
    } else {
        "ascending numbers from 0".to_owned()
    };
    Err(invalid(field, format!("{p10}, {p50}, {p90}"), expected))
}
