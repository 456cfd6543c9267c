//! `synchronize_gradients`, and how a bucket travels.

use std::ops::Range;
use std::time::Instant;

use tch::{Device, Tensor};
use tracing::debug_span;

use super::survey::Need;
use super::{Call, During, Failure, FencePolicy, Options, Outcome, SyncReport, SyncSession, Transport};
use crate::bucket::{self, Member};
use crate::collective::agreement::{Frame, Mask, Merged};
use crate::collective::c10d::{self, TensorList};
use crate::error::{EngineError, Operation, Result, Stage, SyncError, TensorError};
use crate::fault::Point;
use crate::parameters::Parameters;
use crate::tensor::DType;

/// The plan of the step before, used again while schema and used mask are the same.
#[derive(Default)]
pub(super) struct Plan {
    union: Mask,
    active: Vec<usize>,
    buckets: Vec<Range<usize>>,
    made: bool,
}

/// The members of a bucket, sorted by how they travel. Which way a member goes follows from schema and options alone, so
/// it is the same on every rank; its layout, which may differ, only decides whether it is copied first.
pub(super) struct Bucket {
    /// Members that travel each on their own.
    whole: Vec<Whole>,
    /// Members that travel in one flat buffer, of `packed_numel` elements of `wire` dtype.
    pub(super) packed: TensorList,
    packed_numel: i64,
    wire: DType,
    pub(super) nbytes: usize,
}

/// Withdraws the gradients when it is dropped: on every way out but success, a panic included.
struct Withdrawal<'a>(Option<&'a Parameters>);

impl Withdrawal<'_> {
    fn cancel(mut self) {
        self.0 = None;
    }
}

impl Drop for Withdrawal<'_> {
    fn drop(&mut self) {
        if let Some(parameters) = self.0 {
            parameters.withdraw_gradients();
        }
    }
}

struct Whole {
    target: Tensor,
    /// A contiguous copy, where the target itself cannot travel.
    copy: Option<Tensor>,
}

impl Bucket {
    /// Takes the tensors of a bucket (all of one dtype), outside autograd.
    pub(super) fn prepare(
        members: Vec<Tensor>,
        options: &Options,
        reduces: bool,
    ) -> std::result::Result<Self, EngineError> {
        let mut bucket =
            Self { whole: Vec::new(), packed: TensorList::new(), packed_numel: 0, wire: DType(0), nbytes: 0 };
        for tensor in members {
            let facts = c10d::inspect(&tensor)?;
            let casts = reduces && options.reduce_in_float32 && facts.dtype().narrow_float();
            bucket.wire = if casts { DType::FLOAT32 } else { facts.dtype() };
            bucket.nbytes += facts.nbytes();
            let alone = options.transport == Transport::InPlace && facts.nbytes() >= options.in_place_bytes && !casts;
            if alone && facts.numel > 0 {
                let target = tensor.f_detach()?;
                let copy = if facts.contiguous { None } else { Some(c10d::materialize(&target)?) };
                bucket.whole.push(Whole { target, copy });
            } else {
                bucket.packed.push(&tensor)?;
                bucket.packed_numel += facts.numel;
            }
        }
        Ok(bucket)
    }

    /// The tensors that travel each on their own, as they go onto the wire.
    pub(super) fn whole(&self) -> impl Iterator<Item = &Tensor> {
        self.whole.iter().map(|whole| whole.copy.as_ref().unwrap_or(&whole.target))
    }

    /// Puts what has arrived where it belongs.
    pub(super) fn write_back(&self, flat: Option<&Tensor>) -> std::result::Result<(), EngineError> {
        for whole in &self.whole {
            if let Some(copy) = &whole.copy {
                whole.target.shallow_clone().f_copy_(copy)?;
            }
        }
        match flat {
            Some(flat) => self.packed.unpack(flat),
            None => Ok(()),
        }
    }
}

impl SyncSession {
    /// Sums gradients over all ranks, in place (invariants I4, I5, I6). Collective.
    ///
    /// Call it after the last backward pass of a step and before the optimizer's. Local gradients must be normalized
    /// globally already, by a count that [`sum`](Self::sum) gives: nothing is divided here. A gradient that is present on
    /// any rank is present on all afterwards; one that no rank has stays undefined everywhere, so that `AdamW` advances
    /// neither its momentum nor its weight decay.
    ///
    /// # Errors
    ///
    /// Whatever the error, **no listed parameter has a gradient afterwards**: a caller that steps all the same changes
    /// nothing. [`SyncError::Refused`] if a gradient on some rank is sparse, of another dtype, shape or device than its
    /// parameter, of a dtype that cannot be summed, or shares memory with another one; [`SyncError::SchemaDiffers`] if the
    /// lists differ; [`SyncError::Desynchronized`] if a rank is elsewhere or at another `step`; [`SyncError::Interrupted`]
    /// if one is gone; [`SyncError::Poisoned`] after a failure.
    pub fn synchronize_gradients(&mut self, step: u64, parameters: &Parameters) -> Result<SyncReport> {
        self.synchronize(Operation::SynchronizeGradients, step, parameters, None)
    }

    /// Sums gradients over all ranks and divides them by the sum of `local_tokens`. Collective.
    ///
    /// For gradient accumulation, where the number of tokens is known only after the last micro-batch: go backward from
    /// the *sum* of the losses of all tokens, then call this. A rank may have no tokens.
    ///
    /// # Errors
    ///
    /// As [`synchronize_gradients`](Self::synchronize_gradients), and [`SyncError::Uncountable`] if no rank has any token.
    pub fn synchronize_gradients_per_token(
        &mut self,
        step: u64,
        parameters: &Parameters,
        local_tokens: u64,
    ) -> Result<SyncReport> {
        self.synchronize(Operation::SynchronizeGradientsPerToken, step, parameters, Some(local_tokens))
    }

    fn synchronize(
        &mut self,
        operation: Operation,
        step: u64,
        parameters: &Parameters,
        local_tokens: Option<u64>,
    ) -> Result<SyncReport> {
        let unless_done = Withdrawal(Some(parameters));
        let report = self.run(operation, Some(step), None, |session, call| {
            session.synchronize_body(call, parameters, local_tokens)
        })?;
        unless_done.cancel();
        Ok(report)
    }

    fn synchronize_body(
        &mut self,
        call: &mut Call,
        parameters: &Parameters,
        local_tokens: Option<u64>,
    ) -> Outcome<SyncReport> {
        let start = Instant::now();
        let mut report = SyncReport::default();
        let survey = self.survey(parameters, Need::Gradients);
        let frame = self.frame(call).schema(&self.schema.digest).content(survey.count as u64).mask(&survey.used);
        let merged = self.timed_agree(call, frame, survey.refusal.as_ref(), &mut report)?;
        let union = self.union(call, &survey.used, &merged)?;
        let divisor = match local_tokens {
            Some(tokens) => Some(self.count_tokens(call, tokens)?),
            None => None,
        };

        if survey.changed || !self.plan.made || self.plan.union != union {
            let active: Vec<usize> = (0..survey.count).filter(|index| union.get(*index)).collect();
            let buckets = self.plan_buckets(&active);
            self.plan = Plan { union, active, buckets, made: true };
        }
        // Taken out while buckets move, since they need the session.
        let plan = std::mem::take(&mut self.plan);
        report.active = plan.active.len();
        report.globally_unused = survey.count - plan.active.len();
        report.locally_absent = plan.active.iter().filter(|index| !survey.used.get(**index)).count();
        report.buckets = plan.buckets.len();
        let tensors: Vec<&Tensor> = parameters.unique().map(|(_, tensor)| tensor).collect();
        for (index, members) in plan.buckets.iter().enumerate() {
            call.at.bucket = Some((index, plan.buckets.len()));
            let members: Vec<&Tensor> = plan.active[members.clone()].iter().map(|index| tensors[*index]).collect();
            self.reduce_bucket(call, &members, divisor, &mut report)?;
        }
        self.plan = plan;
        report.total = start.elapsed();
        Ok(report)
    }

    /// The union of all ranks' used masks. What the frame has no room for travels in an exchange of its own, whose length
    /// follows from the number of parameters, which has been agreed.
    fn union(&mut self, call: &Call, local: &Mask, merged: &Merged) -> Outcome<Mask> {
        let mut union = local.clone();
        if union.needs_second_exchange() {
            self.communicator.or(union.bytes_mut(), &call.deadline).during(Stage::Agreement)?;
        } else {
            let bytes = union.bytes_mut();
            bytes.copy_from_slice(&merged.mask_bytes()[..bytes.len()]);
        }
        Ok(union)
    }

    fn count_tokens(&mut self, call: &Call, local: u64) -> Outcome<f64> {
        let total = self.sum_agreed(call, local)?;
        if total == 0 {
            return Err(Failure::Verdict(SyncError::Uncountable {
                at: call.at.clone(),
                problem: "no rank has any token, so gradients cannot be divided by their number".into(),
            }));
        }
        // Exact up to 2^53 tokens in one step.
        #[allow(clippy::cast_precision_loss)]
        Ok(total as f64)
    }

    /// Buckets of the given members of the schema, as ranges of positions in `active`.
    pub(super) fn plan_buckets(&self, active: &[usize]) -> Vec<Range<usize>> {
        let members: Vec<_> = active
            .iter()
            .map(|index| &self.schema.members[*index])
            .map(|member| Member { nbytes: member.nbytes, key: (member.dtype, member.device) })
            .collect();
        bucket::plan(&members, self.options.bucket_bytes)
    }

    fn reduce_bucket(
        &mut self,
        call: &mut Call,
        parameters: &[&Tensor],
        divisor: Option<f64>,
        report: &mut SyncReport,
    ) -> Outcome<()> {
        let start = Instant::now();
        let gradients = parameters
            .iter()
            .map(|parameter| c10d::take_grad(parameter))
            .collect::<std::result::Result<Vec<_>, _>>()
            .during(Stage::Local)?;
        let bucket = Bucket::prepare(gradients, &self.options, true).during(Stage::Local)?;
        let flat = self.flat_for(&bucket).during(Stage::Local)?;
        if let Some(flat) = &flat {
            bucket.packed.pack(flat).during(Stage::Local)?;
        }
        report.pack += start.elapsed();
        self.bucket_fence(call, report)?;

        let _entered =
            debug_span!("bucket", index = call.at.bucket.map(|(index, _)| index), bytes = bucket.nbytes).entered();
        let start = Instant::now();
        let mut tickets = Vec::new();
        for tensor in bucket.whole().chain(flat.as_ref()) {
            let timeout = call.deadline.remaining();
            tickets.push(self.communicator.data().all_reduce_sum(tensor, timeout).during(Stage::Data)?);
        }
        self.faults.reach(Point::DataPosted).during(Stage::Data)?;
        for ticket in tickets {
            let timeout = call.deadline.remaining();
            self.communicator.data().wait(ticket, timeout).during(Stage::Data)?;
        }
        self.faults.reach(Point::DataDone).during(Stage::Data)?;
        report.reduce += start.elapsed();

        let start = Instant::now();
        if let Some(divisor) = divisor {
            for tensor in bucket.whole().chain(flat.as_ref()) {
                let mut tensor = tensor.shallow_clone();
                let _ = tensor.f_divide_scalar_(divisor).during(Stage::Local)?;
            }
        }
        bucket.write_back(flat.as_ref()).during(Stage::Local)?;
        report.bytes += bucket.nbytes;
        report.unpack += start.elapsed();
        Ok(())
    }

    /// The session's flat buffer for a bucket, cut to size; none if nothing is packed.
    pub(super) fn flat_for(&mut self, bucket: &Bucket) -> std::result::Result<Option<Tensor>, EngineError> {
        if bucket.packed_numel == 0 {
            return Ok(None);
        }
        let held = self.flats.get(&bucket.wire);
        if held.is_none_or(|flat| c10d::sizes(flat)[0] < bucket.packed_numel) {
            let kind = bucket.wire.kind().ok_or_else(|| EngineError::other("a dtype that tch cannot make"))?;
            let flat = Tensor::f_empty([bucket.packed_numel], (kind, Device::Cpu))?;
            self.flats.insert(bucket.wire, flat);
        }
        let flat = &self.flats[&bucket.wire];
        Ok(Some(flat.f_narrow(0, 0, bucket.packed_numel)?))
    }

    /// The rendezvous before a bucket moves, where the policy asks for one.
    pub(super) fn bucket_fence(&mut self, call: &Call, report: &mut SyncReport) -> Outcome<()> {
        match self.options.fence_policy {
            FencePolicy::EveryBucket => {
                let frame = self.frame(call).schema(&self.schema.digest);
                self.timed_agree(call, frame, None, report).map(drop)
            }
            FencePolicy::Step => Ok(()),
        }
    }

    pub(super) fn timed_agree(
        &mut self,
        call: &Call,
        frame: Frame,
        refusal: Option<&TensorError>,
        report: &mut SyncReport,
    ) -> Outcome<Merged> {
        let start = Instant::now();
        let merged = self.agree(call, frame, refusal);
        report.fence += start.elapsed();
        merged
    }
}
