//! A tensor of any strides, in pieces that follow one another in logical order: what is copied at one time stays small.

use tch::Tensor;

use crate::collective::c10d;
use crate::error::EngineError;

/// Elements of a piece on the CPU: its copy is still in cache when it is hashed, and torch copies so few of them
/// on the thread that asks, without starting threads of its own (it does from 32768).
pub(super) const ON_CPU: usize = 32767;
/// Elements of a piece that has to come from a device.
pub(super) const FROM_DEVICE: usize = 4 << 20;

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
