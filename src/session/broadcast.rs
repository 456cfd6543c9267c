//! `broadcast_trainable_parameters`.

use std::time::Instant;

use super::reduce::Bucket;
use super::survey::Need;
use super::{Call, During, Outcome, SyncReport, SyncSession};
use crate::collective::c10d;
use crate::error::{Operation, Result, Stage};
use crate::fault::Point;
use crate::parameters::Parameters;

const ROOT: u32 = 0;

impl SyncSession {
    /// Gives every rank the parameters of rank 0 (invariant I3). Collective.
    ///
    /// Writes into each rank's own storage, outside autograd: the tensors stay the same objects. Every tensor of the list
    /// is written, whatever its dtype; layouts may differ between ranks.
    ///
    /// # Errors
    ///
    /// [`SyncError::Refused`](crate::SyncError::Refused) if a tensor on some rank is sparse, quantized, undefined, without
    /// data, expanded, or shares memory with another; [`SyncError::SchemaDiffers`](crate::SyncError::SchemaDiffers) if the
    /// lists differ; [`SyncError::Desynchronized`](crate::SyncError::Desynchronized) as everywhere: in all these cases
    /// nothing was written. After [`SyncError::Interrupted`](crate::SyncError::Interrupted) parameters may be partly
    /// overwritten, which the error says.
    pub fn broadcast_trainable_parameters(&mut self, parameters: &Parameters) -> Result<SyncReport> {
        self.run(Operation::BroadcastParameters, None, None, |session, call| {
            let start = Instant::now();
            let mut report = SyncReport::default();
            let survey = session.survey(parameters, Need::Writable);
            let frame = session.frame(call).schema(&session.schema.digest).content(survey.count as u64);
            session.timed_agree(call, frame, survey.refusal.as_ref(), &mut report)?;
            let all: Vec<usize> = (0..survey.count).collect();
            let buckets = session.plan_buckets(&all);
            report.active = all.len();
            report.buckets = buckets.len();
            let tensors: Vec<&tch::Tensor> = parameters.unique().map(|(_, tensor)| tensor).collect();
            for (index, members) in buckets.iter().enumerate() {
                call.at.bucket = Some((index, buckets.len()));
                let members: Vec<&tch::Tensor> = all[members.clone()].iter().map(|index| tensors[*index]).collect();
                session.broadcast_bucket(call, &members, &mut report)?;
            }
            report.total = start.elapsed();
            Ok(report)
        })
    }

    fn broadcast_bucket(&mut self, call: &mut Call, members: &[&tch::Tensor], report: &mut SyncReport) -> Outcome<()> {
        let start = Instant::now();
        let handles: Vec<tch::Tensor> = members.iter().map(|tensor| tensor.shallow_clone()).collect();
        let bucket = Bucket::prepare(handles, &self.options, false).during(Stage::Local)?;
        let flat = self.flat_for(&bucket).during(Stage::Local)?;
        if let Some(flat) = &flat
            && self.rank() == 0
        {
            bucket.packed.pack(flat).during(Stage::Local)?;
        }
        report.pack += start.elapsed();
        self.bucket_fence(call, report)?;

        let start = Instant::now();
        call.parameters_unspecified = true;
        let mut tickets = Vec::new();
        for tensor in bucket.whole().chain(flat.as_ref()) {
            // As bytes: every dtype travels, also those that Gloo has no type for.
            let bytes = c10d::as_bytes(tensor).during(Stage::Data)?;
            let timeout = call.deadline.remaining();
            tickets.push(self.communicator.data().broadcast(&bytes, ROOT, timeout).during(Stage::Data)?);
        }
        self.faults.reach(Point::DataPosted).during(Stage::Data)?;
        for ticket in tickets {
            let timeout = call.deadline.remaining();
            self.communicator.data().wait(ticket, timeout).during(Stage::Data)?;
        }
        self.faults.reach(Point::DataDone).during(Stage::Data)?;
        report.reduce += start.elapsed();

        let start = Instant::now();
        if self.rank() != 0 {
            bucket.write_back(flat.as_ref()).during(Stage::Local)?;
        }
        for member in members {
            c10d::bump_version(member).during(Stage::Local)?;
        }
        report.bytes += bucket.nbytes;
        report.unpack += start.elapsed();
        Ok(())
    }
}
