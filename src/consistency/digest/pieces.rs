//! A tensor of any strides, in pieces that follow one another in logical order: what is copied at one time stays small.

use tch::{Device, Kind, Tensor};

use crate::collective::c10d::{self, TensorFacts};
use crate::error::EngineError;

/// Elements of a piece that torch copies on the thread that asks: from 32768 it starts threads of its own, and those of a
/// thread are not shared with another's.
const SERIAL: usize = 32767;
/// Elements of a tile: about as many rows as columns, so that of each cache line that is read all elements are used.
const TILE: i64 = 8 << 10;
/// Bytes of a piece in CPU memory: still in cache when it is hashed.
const STAGED: usize = 512 << 10;
/// Elements of a piece that has to come from a device.
const FROM_DEVICE: usize = 4 << 20;

/// Calls `each` with the bytes of all elements in logical order, piece by piece. `tensor` must not be part of an autograd
/// graph.
pub(super) fn for_each_bytes(
    tensor: &Tensor,
    facts: &TensorFacts,
    each: &mut dyn FnMut(&[u8]),
) -> Result<(), EngineError> {
    let Some(kind) = facts.dtype().kind().filter(|_| facts.device().is_cpu()) else {
        let most = if facts.device().is_cpu() { SERIAL } else { FROM_DEVICE };
        return for_each(tensor, most, &mut |piece| {
            each(c10d::bytes(&c10d::materialize(piece)?)?);
            Ok(())
        });
    };
    let most = STAGED / kind.elt_size_in_bytes();
    let staging = staging(most, facts.numel, kind)?;
    for_each(tensor, most, &mut |piece| {
        let shape = c10d::sizes(piece);
        let flat = staging.f_narrow(0, 0, shape.iter().product())?;
        gather(&flat.f_view(shape)?, piece)?;
        each(c10d::bytes(&flat)?);
        Ok(())
    })
}

fn staging(most: usize, numel: i64, kind: Kind) -> Result<Tensor, EngineError> {
    let length = i64::try_from(most).unwrap_or(i64::MAX).min(numel);
    Ok(Tensor::f_empty([length], (kind, Device::Cpu))?)
}

/// Copies tile by tile.
fn gather(destination: &Tensor, source: &Tensor) -> Result<(), EngineError> {
    let shape = c10d::sizes(source);
    let longest = (0_i64..).zip(shape.iter().copied()).max_by_key(|(_, length)| *length);
    match longest {
        Some((dimension, length)) if length > 1 && shape.iter().product::<i64>() > TILE => {
            let half = length / 2;
            for (start, count) in [(0, half), (half, length - half)] {
                gather(&destination.f_narrow(dimension, start, count)?, &source.f_narrow(dimension, start, count)?)?;
            }
        }
        _ => {
            destination.shallow_clone().f_copy_(source)?;
        }
    }
    Ok(())
}

/// Calls `each` with views of at most `most` elements. `tensor` must not be part of an autograd graph.
pub(super) fn for_each(
    tensor: &Tensor,
    most: usize,
    each: &mut dyn FnMut(&Tensor) -> Result<(), EngineError>,
) -> Result<(), EngineError> {
    let shape = c10d::sizes(tensor);
    let numel: i64 = shape.iter().product();
    let most_elements = i64::try_from(most.max(1)).unwrap_or(i64::MAX);
    if numel == 0 {
        return Ok(());
    }
    // More than one element: there is a dimension with more than one index.
    let Some((dimension, length)) = (0_i64..).zip(shape.iter().copied()).find(|(_, length)| *length > 1) else {
        return each(tensor);
    };
    if numel <= most_elements {
        return each(tensor);
    }
    let inner = numel / length;
    if inner > most_elements {
        for index in 0..length {
            for_each(&tensor.f_select(dimension, index)?, most, each)?;
        }
        return Ok(());
    }
    let rows = most_elements / inner;
    let mut start = 0;
    while start < length {
        let count = rows.min(length - start);
        each(&tensor.f_narrow(dimension, start, count)?)?;
        start += count;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use tch::{Kind, Tensor};

    use super::for_each;

    #[test]
    fn pieces_follow_one_another_and_are_small() {
        let base = Tensor::arange(2 * 3 * 5 * 7, (Kind::Int64, tch::Device::Cpu)).view([2, 3, 5, 7]);
        let expanded = Tensor::arange(3, (Kind::Int64, tch::Device::Cpu)).view([3, 1]).expand([3, 4], false);
        for tensor in [base.permute([3, 1, 0, 2]), base.transpose(0, 3), base, expanded, Tensor::from(5_i64)] {
            for most in [1, 2, 6, 7, 15, 70, 105, 209, 210, 1000] {
                let mut values: Vec<i64> = Vec::new();
                for_each(&tensor, most, &mut |piece| {
                    assert!(piece.numel() <= most, "{} of {most}", piece.numel());
                    values.extend(Vec::<i64>::try_from(piece.contiguous().view(-1)).unwrap());
                    Ok(())
                })
                .unwrap();
                assert_eq!(values, Vec::<i64>::try_from(tensor.contiguous().view(-1)).unwrap(), "{most}");
            }
        }
        for_each(&Tensor::zeros([3, 0], (Kind::Float, tch::Device::Cpu)), 1, &mut |_| panic!("no elements")).unwrap();
    }
}
