//! Bucket planning (invariant I1): pure, and ignorant of collectives.

#![forbid(unsafe_code)]

use std::ops::Range;

/// What planning needs to know of a member. Members of one bucket have equal `key`s.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Member<K> {
    pub(crate) nbytes: usize,
    pub(crate) key: K,
}

/// Splits `members`, in order, into buckets of at most `limit` bytes.
///
/// A bucket closes when the next member would pass the limit or has another key. A member larger than the limit is
/// alone. No bucket is empty; the buckets cover every member once.
pub(crate) fn plan<K: PartialEq>(members: &[Member<K>], limit: usize) -> Vec<Range<usize>> {
    let mut buckets = Vec::new();
    let mut start = 0;
    let mut size = 0_usize;
    for (index, member) in members.iter().enumerate() {
        let closes = index > start
            && (size.checked_add(member.nbytes).is_none_or(|sum| sum > limit) || member.key != members[start].key);
        if closes {
            buckets.push(start..index);
            start = index;
            size = 0;
        }
        size = size.saturating_add(member.nbytes);
    }
    if start < members.len() {
        buckets.push(start..members.len());
    }
    buckets
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use proptest::prelude::*;

    use super::{Member, plan};

    fn members(sizes: &[(usize, u8)]) -> Vec<Member<u8>> {
        sizes.iter().map(|&(nbytes, key)| Member { nbytes, key }).collect()
    }

    #[track_caller]
    fn assert_plan(sizes: &[(usize, u8)], limit: usize, expected: &[Range<usize>]) {
        assert_eq!(plan(&members(sizes), limit), expected);
    }

    #[test]
    fn nothing_makes_no_bucket() {
        assert_plan(&[], 10, &[]);
    }

    #[test]
    fn a_bucket_may_be_exactly_full() {
        assert_plan(&[(4, 0), (6, 0), (1, 0)], 10, &[0..2, 2..3]);
    }

    #[test]
    fn a_large_member_is_alone() {
        assert_plan(&[(1, 0), (11, 0), (1, 0)], 10, &[0..1, 1..2, 2..3]);
    }

    #[test]
    fn another_key_closes_a_bucket() {
        assert_plan(&[(1, 0), (1, 1), (1, 0)], 10, &[0..1, 1..2, 2..3]);
    }

    #[test]
    fn empty_members_join_any_bucket() {
        assert_plan(&[(10, 0), (0, 0), (0, 0), (1, 0)], 10, &[0..3, 3..4]);
    }

    #[test]
    fn sizes_near_the_end_of_the_range_do_not_wrap() {
        assert_plan(&[(usize::MAX, 0), (usize::MAX, 0)], usize::MAX, &[0..1, 1..2]);
    }

    /// The reference's rule, member by member.
    fn plain(members: &[Member<u8>], limit: usize) -> Vec<Range<usize>> {
        let mut buckets: Vec<Range<usize>> = Vec::new();
        for (index, member) in members.iter().enumerate() {
            let fits = buckets.last().is_some_and(|bucket| {
                let size: usize = members[bucket.clone()].iter().map(|member| member.nbytes).sum();
                size + member.nbytes <= limit && members[bucket.start].key == member.key
            });
            match buckets.last_mut() {
                Some(bucket) if fits => bucket.end = index + 1,
                _ => buckets.push(index..index + 1),
            }
        }
        buckets
    }

    proptest! {
        #[test]
        fn agrees_with_the_plain_rule(
            sizes in proptest::collection::vec((0_usize..40, 0_u8..3), 0..60),
            limit in 1_usize..60,
        ) {
            let members = members(&sizes);
            let planned = plan(&members, limit);
            prop_assert_eq!(&planned, &plain(&members, limit));
            prop_assert!(planned.iter().all(|bucket| !bucket.is_empty()));
            let covered: Vec<usize> = planned.into_iter().flatten().collect();
            prop_assert_eq!(covered, (0..members.len()).collect::<Vec<_>>());
        }
    }
}
