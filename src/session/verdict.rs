//! From a disagreement to the same error on every rank: all ranks have read the same result, so all of them gather
//! details, and all build the error from the same details.

use itertools::Itertools;
use serde::{Deserialize, Serialize};

use super::{Call, During, Failure, Outcome, SyncSession};
use crate::collective::agreement::PROTOCOL;
use crate::error::{
    Desynchronization, DesynchronizedField, EngineError, Position, Refusal, SchemaDifference, Stage, SyncError,
    TensorError, sides,
};
use crate::parameters::SchemaLine;

/// What a rank tells when ranks disagree.
#[derive(Serialize, Deserialize)]
struct Detail {
    protocol: u32,
    at: Position,
    content: String,
    options: Vec<(String, String)>,
    schema: [u8; 16],
    refusal: Option<TensorError>,
}

impl SyncSession {
    pub(super) fn settle(&mut self, call: &Call, refusal: Option<&TensorError>) -> Failure {
        match self.verdict(call, refusal) {
            Ok(error) => Failure::Verdict(error),
            Err(failure) => failure,
        }
    }

    fn verdict(&mut self, call: &Call, refusal: Option<&TensorError>) -> Outcome<SyncError> {
        let own = Detail {
            protocol: PROTOCOL,
            at: call.at.clone(),
            content: call.content.to_string(),
            options: self.options.shared(),
            schema: self.schema.digest,
            refusal: refusal.cloned(),
        };
        let details: Vec<Detail> = self.gather_json(call, &own)?;

        let differs = |field: DesynchronizedField, value: &dyn Fn(&Detail) -> String| {
            let sides = sides(details.iter().map(value));
            (sides.len() > 1)
                .then(|| SyncError::Desynchronized(Box::new(Desynchronization { call: call.at.call, field, sides })))
        };
        let different_call = differs(DesynchronizedField::Protocol, &|detail| format!("protocol {}", detail.protocol))
            .or_else(|| {
                differs(DesynchronizedField::Operation, &|detail| detail.at.to_string())
                    .filter(|_| !details.iter().map(|detail| detail.at.operation).all_equal())
            })
            .or_else(|| differs(DesynchronizedField::Sequence, &|detail| format!("call {}", detail.at.call)))
            .or_else(|| {
                differs(DesynchronizedField::Step, &|detail| detail.at.to_string())
                    .filter(|_| !details.iter().map(|detail| detail.at.step).all_equal())
            })
            .or_else(|| differs(DesynchronizedField::Phase, &|detail| detail.at.to_string()))
            .or_else(|| differs(DesynchronizedField::Options, &|detail| differing_options(&details, detail)));
        if let Some(error) = different_call {
            return Ok(error);
        }

        let refusals: Vec<(usize, &TensorError)> = details
            .iter()
            .enumerate()
            .filter_map(|(rank, detail)| detail.refusal.as_ref().map(|error| (rank, error)))
            .collect();
        if let Some((rank, error)) = refusals.first() {
            let others = refusals[1..].iter().map(|(rank, _)| *rank).collect();
            let refusal = Refusal { at: call.at.clone(), rank: *rank, error: (*error).clone(), others };
            return Ok(SyncError::Refused(Box::new(refusal)));
        }
        if !details.iter().map(|detail| detail.schema).all_equal() {
            return self.first_schema_difference(call);
        }
        Ok(SyncError::Desynchronized(Box::new(Desynchronization {
            call: call.at.call,
            field: DesynchronizedField::Content,
            sides: sides(
                details.iter().map(|detail| format!("{} {}", detail.at, detail.content).trim_end().to_string()),
            ),
        })))
    }

    /// Collective: every rank's value of a type that all ranks know.
    pub(super) fn gather_json<T: Serialize + for<'de> Deserialize<'de>>(
        &mut self,
        call: &Call,
        own: &T,
    ) -> Outcome<Vec<T>> {
        let json = |error: serde_json::Error| EngineError::other(error.to_string());
        let bytes = serde_json::to_vec(own).map_err(json).during(Stage::Local)?;
        let gathered = self.communicator.gather(&bytes, &call.deadline).during(Stage::Details)?;
        gathered.iter().map(|bytes| serde_json::from_slice(bytes).map_err(json).during(Stage::Details)).collect()
    }

    /// Finds the first line that is not the same everywhere: hashes of all lines first, then that one line of each rank.
    fn first_schema_difference(&mut self, call: &Call) -> Outcome<SyncError> {
        let own: Vec<u8> = self.schema.lines().iter().flat_map(|line| line.hash().to_le_bytes()).collect();
        let hashes = self.communicator.gather(&own, &call.deadline).during(Stage::Details)?;
        let longest = hashes.iter().map(Vec::len).max().unwrap_or(0) / 8;
        let line = |hashes: &[u8], index: usize| hashes.get(index * 8..index * 8 + 8).map(<[u8]>::to_vec);
        let index =
            (0..longest).find(|index| !hashes.iter().map(|hashes| line(hashes, *index)).all_equal()).unwrap_or(longest);

        let own = self.schema.lines().get(index).map(|line| (line.name.clone(), line.text.clone()));
        let lines: Vec<Option<(String, String)>> = self.gather_json(call, &own)?;
        Ok(SyncError::SchemaDiffers(Box::new(describe_difference(call.at.clone(), index, lines))))
    }
}

/// The options of one rank that are not the same on all.
fn differing_options(details: &[Detail], detail: &Detail) -> String {
    detail
        .options
        .iter()
        .filter(|option| !details.iter().all(|other| other.options.contains(option)))
        .map(|(name, value)| format!("{name} {value}"))
        .join(", ")
}

/// Lists are in name order and equal up to `index`, so the smallest name there is the first that some rank lacks, or
/// that all have with different properties.
fn describe_difference(at: Position, index: usize, lines: Vec<Option<(String, String)>>) -> SchemaDifference {
    let lines: Vec<Option<SchemaLine>> =
        lines.into_iter().map(|line| line.map(|(name, text)| SchemaLine { name, text })).collect();
    let name = lines.iter().flatten().map(|line| &line.name).min().cloned().unwrap_or_default();
    let sides = sides(lines.iter().map(|line| match line {
        Some(line) if line.name == name => line.text.clone(),
        _ => "no such parameter".to_string(),
    }));
    SchemaDifference { at, index, name, sides }
}

#[cfg(test)]
mod tests {
    use super::describe_difference;
    use crate::error::{Operation, Position};

    fn describe(lines: &[Option<(&str, &str)>]) -> String {
        let at =
            Position { operation: Operation::SynchronizeGradients, step: Some(1), phase: None, call: 2, bucket: None };
        let lines = lines.iter().map(|line| line.map(|(name, text)| (name.into(), text.into()))).collect();
        describe_difference(at, 4, lines).to_string()
    }

    #[test]
    fn a_missing_parameter_is_told_from_a_changed_one() {
        let missing = describe(&[Some(("b", "float32 [1]")), Some(("c", "float32 [1]")), None]);
        assert!(missing.contains("\"b\""), "{missing}");
        assert!(missing.contains("rank 0: float32 [1]; ranks 1, 2: no such parameter"), "{missing}");
        let changed = describe(&[Some(("b", "float32 [1]")), Some(("b", "float32 [2]"))]);
        assert!(changed.contains("rank 0: float32 [1]; rank 1: float32 [2]"), "{changed}");
    }
}
