//! Where replicas differ: the first element of the first tensor that can be compared, without sending the tensor.
//!
//! Digests of 1 MiB chunks find the chunk; one member of each side sends it, so that all ranks see the same values.

use std::ops::Range;

use itertools::Itertools;
use tch::{Kind, Tensor};

use super::{Call, During, Outcome, SyncSession};
use crate::collective::c10d;
use crate::consistency::digest::Entry;
use crate::error::{Divergence, EngineError, FirstDifference, Side, Stage};
use crate::parameters::NamedTensor;
use crate::tensor::{DType, inspect};

const CHUNK: usize = 1 << 20;
/// Bytes of a chunk's digest.
const HASH: usize = 16;
/// Sides whose values are shown; with more, the chunk of each would have to travel.
const SIDES: usize = 8;

impl SyncSession {
    /// Collective. Adds to the report where the first comparable tensor differs first. `by_rank` are the entries that all
    /// ranks have gathered, so that all of them take the same way through here.
    pub(super) fn locate(
        &mut self,
        call: &Call,
        tensors: &[NamedTensor],
        by_rank: &[Vec<Entry>],
        report: &mut Divergence,
    ) -> Outcome<()> {
        let Some(name) =
            report.tensors.iter().map(|tensor| &tensor.name).find(|name| comparable(name, by_rank)).cloned()
        else {
            return Ok(());
        };
        let tensor = tensors
            .iter()
            .find(|tensor| tensor.name == name)
            .and_then(|named| named.tensor.as_ref())
            .ok_or_else(|| EngineError::other("the compared tensor is gone"))
            .during(Stage::Local)?;
        let plain = c10d::materialize(tensor).during(Stage::Local)?;
        let dtype =
            inspect(&plain).map_err(|problem| EngineError::other(problem.to_string())).during(Stage::Local)?.dtype();
        let bytes = c10d::bytes(&plain).during(Stage::Local)?;

        let hashes: Vec<u8> =
            bytes.chunks(CHUNK).flat_map(|chunk| blake3::hash(chunk).as_bytes()[..HASH].to_vec()).collect();
        let everywhere = self.communicator.gather(&hashes, &call.deadline).during(Stage::Details)?;
        let chunks = bytes.len().div_ceil(CHUNK);
        let of = |rank: usize, chunk: usize| everywhere[rank].get(chunk * HASH..(chunk + 1) * HASH);
        let differing: Vec<usize> =
            (0..chunks).filter(|chunk| !(0..everywhere.len()).map(|rank| of(rank, *chunk)).all_equal()).collect();
        // Tensors that were written to since they were hashed may be equal by now.
        let Some(&first) = differing.first() else { return Ok(()) };

        let mut groups: Vec<(Option<&[u8]>, Vec<usize>)> = Vec::new();
        for rank in 0..everywhere.len() {
            match groups.iter_mut().find(|(hash, _)| *hash == of(rank, first)) {
                Some((_, ranks)) => ranks.push(rank),
                None => groups.push((of(rank, first), vec![rank])),
            }
        }
        groups.truncate(SIDES);
        let range = first * CHUNK..bytes.len().min((first + 1) * CHUNK);
        let mut sent = Vec::with_capacity(groups.len());
        for (_, ranks) in &groups {
            let mut chunk = bytes[range.clone()].to_vec();
            self.communicator.broadcast_bytes(&mut chunk, ranks[0], &call.deadline).during(Stage::Details)?;
            sent.push(chunk);
        }
        let size = bytes.len() / plain.numel().max(1);
        let element =
            (0..range.len() / size).find(|element| !sent.iter().map(|chunk| &chunk[cut(*element, size)]).all_equal());
        report.first = element.map(|element| FirstDifference {
            tensor: name,
            index: unravel(range.start / size + element, c10d::sizes(&plain)),
            sides: groups
                .iter()
                .zip(&sent)
                .map(|((_, ranks), chunk)| Side {
                    ranks: ranks.clone(),
                    value: show(&chunk[cut(element, size)], dtype),
                })
                .collect(),
            chunks,
            chunks_differing: differing.len(),
        });
        Ok(())
    }
}

fn cut(element: usize, size: usize) -> Range<usize> {
    element * size..(element + 1) * size
}

/// Whether every rank holds a tensor of that name, of the same dtype and shape.
fn comparable(name: &str, by_rank: &[Vec<Entry>]) -> bool {
    let kinds: Vec<Option<&String>> = by_rank
        .iter()
        .map(|entries| {
            let entry = entries.iter().find(|entry| entry.name == name)?;
            entry.content.as_ref().map(|content| &content.kind)
        })
        .collect();
    kinds.iter().all(Option::is_some) && kinds.iter().all_equal()
}

/// The position of an element in a tensor of this shape, from its position in logical order.
fn unravel(flat: usize, shape: &[i64]) -> Vec<i64> {
    let mut rest = i64::try_from(flat).unwrap_or(i64::MAX);
    let mut index: Vec<i64> = shape
        .iter()
        .rev()
        .map(|size| {
            let position = rest % size;
            rest /= size;
            position
        })
        .collect();
    index.reverse();
    index
}

/// The value of one element, with its bits: values that print alike may differ in them.
fn show(bytes: &[u8], dtype: DType) -> String {
    let bits = bytes.iter().rev().map(|byte| format!("{byte:02x}")).join("");
    match value(bytes, dtype) {
        Some(value) => format!("{value} (0x{bits})"),
        None => format!("0x{bits}"),
    }
}

fn value(bytes: &[u8], dtype: DType) -> Option<String> {
    let kind = dtype.kind()?;
    let tensor = Tensor::f_from_data_size(bytes, &[1], kind).ok()?;
    match kind {
        Kind::Uint8 | Kind::Int8 | Kind::Int16 | Kind::Int | Kind::Int64 | Kind::Bool => {
            tensor.f_int64_value(&[0]).ok().map(|value| value.to_string())
        }
        Kind::ComplexHalf | Kind::ComplexFloat | Kind::ComplexDouble => None,
        _ => {
            let wide = tensor.f_to_kind(Kind::Double).ok()?;
            wide.f_double_value(&[0]).ok().map(|value| format!("{value:?}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{show, unravel};
    use crate::tensor::DType;

    #[test]
    fn positions_are_in_logical_order() {
        assert_eq!(unravel(0, &[]), [0_i64; 0]);
        assert_eq!(unravel(7, &[11]), [7]);
        assert_eq!(unravel(23, &[2, 3, 4]), [1, 2, 3]);
        assert_eq!(unravel(13, &[2, 3, 4]), [1, 0, 1]);
    }

    #[test]
    fn values_are_shown_with_their_bits() {
        assert_eq!(show(&1.5_f32.to_le_bytes(), DType::FLOAT32), "1.5 (0x3fc00000)");
        assert_eq!(show(&(-0.0_f32).to_le_bytes(), DType::FLOAT32), "-0.0 (0x80000000)");
        assert_eq!(show(&(-3_i64).to_le_bytes(), DType(4)), "-3 (0xfffffffffffffffd)");
        assert_eq!(show(&[1], DType(11)), "1 (0x01)");
        assert_eq!(show(&[0x80, 0x3f], DType(15)), "1.0 (0x3f80)");
        // No name in tch: the bits alone.
        assert_eq!(show(&[0x34, 0x12], DType(27)), "0x1234");
    }
}
