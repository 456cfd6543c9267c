//! The same inputs through torch in Python and through the crate, at the same world size: the same bits.
//!
//! The other side is `peer/peer.py`. It needs a Python with the torch that the crate is linked with: the one that
//! `SFT_SYNC_PYTHON` names, or else `python3`.
#![allow(missing_docs)]

mod common;
mod peer;

use common::ranks_with;
use peer::{Check, Inputs, Parameter, RankResult, Run, RunResult, Source};
use sft_sync::{Parameters, SyncError, SyncReport, SyncSession, Transport, tensor_digest};
use tch::{Kind, Tensor};

/// Tensors of this size and more travel on their own, in most runs.
const LINE: usize = 4 << 10;

/// Both ways at each size: several buckets that mix large and small tensors, each tensor in a bucket of its own, and few
/// buckets of many tensors.
const RUNS: [Run; 6] = [
    Run { transport: "flat", bucket_bytes: 4 * LINE, in_place_bytes: LINE },
    Run { transport: "in place", bucket_bytes: 4 * LINE, in_place_bytes: LINE },
    Run { transport: "flat", bucket_bytes: 1, in_place_bytes: 1 },
    Run { transport: "in place", bucket_bytes: 1, in_place_bytes: 1 },
    Run { transport: "flat", bucket_bytes: 1 << 20, in_place_bytes: 3 * LINE },
    Run { transport: "in place", bucket_bytes: 1 << 20, in_place_bytes: 3 * LINE },
];

/// Element types that gradients come in.
const FLOATS: [Kind; 4] = [Kind::Float, Kind::BFloat16, Kind::Double, Kind::Half];

// ---- values --------------------------------------------------------------------------------------------------------

/// Bits that depend on every part of the seed (splitmix64).
fn bits(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A number in (-4, 4) of uneven magnitude: sums of a few of them round, in every type, so that their order shows.
fn number(seed: u64, index: usize) -> f64 {
    let bits = bits(bits(seed).wrapping_add(index as u64));
    let unit = f64::from(u32::try_from(bits >> 32).unwrap()) / f64::from(u32::MAX) * 2.0 - 1.0;
    unit * f64::from(1 << (bits % 5)) / 4.0
}

fn bytes_of(tensor: &Tensor) -> Vec<u8> {
    let plain = tensor.detach().contiguous();
    let mut bytes = vec![0; plain.numel() * plain.kind().elt_size_in_bytes()];
    if !bytes.is_empty() {
        plain.copy_data_u8(&mut bytes, plain.numel());
    }
    bytes
}

/// The values as float64.
fn doubles(bytes: &[u8], kind: Kind) -> Vec<f64> {
    let numel = i64::try_from(bytes.len() / kind.elt_size_in_bytes()).unwrap();
    let tensor = Tensor::f_from_data_size(bytes, &[numel], kind).unwrap();
    Vec::try_from(tensor.to_kind(Kind::Double)).unwrap()
}

fn storage_of(kind: Kind, numbers: &[f64]) -> Vec<u8> {
    bytes_of(&Tensor::from_slice(numbers).to_kind(kind))
}

// ---- layouts -------------------------------------------------------------------------------------------------------

/// How a tensor lies in its storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    Contiguous,
    /// The last two dimensions swapped.
    Transposed,
    /// For four dimensions.
    ChannelsLast,
    /// One row, many times.
    Expanded,
    /// Every second element of longer rows, from the second on.
    Sliced,
    /// Contiguous but for the strides of dimensions of size 1, which mean nothing.
    OddOnes,
}
use Layout::{ChannelsLast, Contiguous, Expanded, OddOnes, Sliced, Transposed};

impl Layout {
    /// The order in which dimensions lie in memory, outermost first.
    fn order(self, dims: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..dims).collect();
        match self {
            Transposed => order.swap(dims - 2, dims - 1),
            ChannelsLast => order[1..].rotate_left(1),
            Contiguous | Expanded | Sliced | OddOnes => {}
        }
        order
    }

    fn fits(self, size: &[i64]) -> bool {
        match self {
            Contiguous => true,
            Transposed => size.len() >= 2,
            ChannelsLast => size.len() == 4,
            Expanded | Sliced => !size.is_empty(),
            OddOnes => size.contains(&1),
        }
    }

    /// Strides and offset.
    fn strides(self, size: &[i64]) -> (Vec<i64>, i64) {
        assert!(self.fits(size), "{self:?} {size:?}");
        let mut stride = vec![0; size.len()];
        let mut next = if self == Sliced { 2 } else { 1 };
        for dim in self.order(size.len()).into_iter().rev() {
            stride[dim] = next;
            // A gap after each innermost row, too.
            let gap = if self == Sliced && dim == size.len() - 1 { 3 } else { 0 };
            next = next * size[dim].max(1) + gap;
        }
        match self {
            Expanded => stride[0] = 0,
            OddOnes => (0..size.len()).filter(|dim| size[*dim] == 1).for_each(|dim| stride[dim] = 7),
            Contiguous | Transposed | ChannelsLast | Sliced => {}
        }
        (stride, i64::from(self == Sliced))
    }

    /// A tensor whose storage is filled with what `fill` makes for a number of elements.
    fn source(self, kind: Kind, size: &[i64], fill: impl FnOnce(usize) -> Vec<u8>) -> Source {
        let (stride, offset) = self.strides(size);
        let last: i64 = size.iter().zip(&stride).map(|(size, stride)| (size - 1).max(0) * stride).sum();
        let numel: i64 = size.iter().product();
        let elements = offset + if numel > 0 { last + 1 } else { 0 };
        let storage = fill(usize::try_from(elements).unwrap());
        Source { kind, size: size.to_vec(), stride, offset, storage, conjugate: false, negative: false }
    }
}

// ---- the model -----------------------------------------------------------------------------------------------------

/// Which ranks have a gradient.
#[derive(Clone, Copy, Debug)]
enum Used {
    Everywhere,
    Nowhere,
    EvenRanks,
    AllButFirst,
    LastOnly,
}

impl Used {
    fn on(self, rank: usize, world: usize) -> bool {
        match self {
            Self::Everywhere => true,
            Self::Nowhere => false,
            Self::EvenRanks => rank.is_multiple_of(2),
            Self::AllButFirst => rank > 0,
            Self::LastOnly => rank + 1 == world,
        }
    }
}

/// A parameter of the model, on all ranks.
struct Spec {
    name: &'static str,
    size: Vec<i64>,
    layout: Layout,
    /// Of the gradient, from rank to rank in turn.
    gradients: &'static [Layout],
    used: Used,
}

fn spec(name: &'static str, size: &[i64], layout: Layout, gradients: &'static [Layout], used: Used) -> Spec {
    Spec { name, size: size.to_vec(), layout, gradients, used }
}

/// Parameters of one element type, smaller and larger than a bucket and than the line, in every layout.
fn specs(kind: Kind) -> Vec<Spec> {
    let line = i64::try_from(LINE / kind.elt_size_in_bytes()).unwrap();
    vec![
        spec("bias", &[37], Contiguous, &[Contiguous], Used::Everywhere),
        spec("conv.large", &[16, 12, 5, 5], ChannelsLast, &[ChannelsLast, Contiguous], Used::Everywhere),
        spec("conv.small", &[8, 6, 3, 5], ChannelsLast, &[Contiguous, ChannelsLast, Transposed], Used::Everywhere),
        spec("embedding", &[131, 71], Contiguous, &[Contiguous, Transposed], Used::Everywhere),
        // After a tensor that is alone, two that fill the next bucket exactly.
        spec("embedding.first", &[3 * line], Contiguous, &[Contiguous], Used::Everywhere),
        spec("embedding.second", &[line], Contiguous, &[Contiguous], Used::Everywhere),
        spec("empty", &[0, 3], Contiguous, &[Contiguous, Transposed], Used::Everywhere),
        spec("empty.half", &[5, 0], Contiguous, &[Contiguous], Used::EvenRanks),
        spec("expanded.large", &[61, 83], Contiguous, &[Expanded], Used::Everywhere),
        spec("expanded.small", &[19, 13], Contiguous, &[Expanded, Contiguous], Used::Everywhere),
        spec("half.large", &[67, 79], Transposed, &[Transposed, Sliced], Used::EvenRanks),
        spec("half.small", &[41, 11], Sliced, &[Contiguous, Sliced], Used::AllButFirst),
        spec("late", &[59, 61], Contiguous, &[Contiguous], Used::LastOnly),
        spec("line.above", &[line + 1], Contiguous, &[Contiguous], Used::Everywhere),
        spec("line.at", &[line], Contiguous, &[Contiguous, Sliced], Used::Everywhere),
        spec("line.below", &[line - 1], Contiguous, &[Contiguous], Used::Everywhere),
        spec("one", &[1], Contiguous, &[OddOnes, Contiguous], Used::Everywhere),
        spec("ones.large", &[1, line + 3, 1], OddOnes, &[OddOnes, Contiguous], Used::Everywhere),
        spec("ones.small", &[1, 89, 1], Contiguous, &[Contiguous, OddOnes], Used::Everywhere),
        spec("scalar", &[], Contiguous, &[Contiguous], Used::Everywhere),
        spec("scalar.half", &[], Contiguous, &[Contiguous], Used::LastOnly),
        spec("sliced", &[23, 29], Sliced, &[Sliced], Used::Everywhere),
        spec("unusual", &[4999], Contiguous, &[Contiguous], Used::Everywhere),
        spec("unused", &[101], Contiguous, &[Contiguous], Used::Nowhere),
    ]
}

/// Infinities, not-a-numbers with and without payload, negative zeros and the smallest numbers, among other values. At
/// each index at most one rank has a value that is not finite: what two of them make depends on their order.
fn put_unusual(storage: &mut [u8], kind: Kind, rank: usize) {
    let width = kind.elt_size_in_bytes();
    // Sign and exponent, as the leading bytes of each pattern.
    let (infinity, nan): (u64, u64) = match kind {
        Kind::Half => (0x7c00, 0x7e2b),
        Kind::BFloat16 => (0x7f80, 0x7fcb),
        Kind::Float => (0x7f80_0000, 0x7fc0_00ab),
        _ => (0x7ff0_0000_0000_0000, 0x7ff8_0000_0000_00ab),
    };
    let sign = 1_u64 << (8 * width - 1);
    let patterns = [infinity, infinity | sign, nan, nan | sign];
    for (index, element) in storage.chunks_exact_mut(width).enumerate() {
        let pattern = match index % 23 {
            turn @ 0..8 if turn % 4 == rank => patterns[index / 23 % patterns.len()],
            8 => sign,
            9 => 1,
            10 => 1 | sign,
            _ => continue,
        };
        element.copy_from_slice(&pattern.to_le_bytes()[..width]);
    }
}

/// What `rank` holds: its own values and gradients under names and shapes that all ranks share.
fn model(rank: usize, world: usize) -> Vec<Parameter> {
    let mut parameters = Vec::new();
    for (block, kind) in FLOATS.into_iter().enumerate() {
        for (position, spec) in specs(kind).into_iter().enumerate() {
            let seed = bits((rank * 2) as u64 ^ bits((block * 100 + position) as u64));
            let value = spec.layout.source(kind, &spec.size, |count| fill(kind, seed, count));
            let gradient = spec.used.on(rank, world).then(|| {
                let layout = spec.gradients[rank % spec.gradients.len()];
                let mut gradient = layout.source(kind, &spec.size, |count| fill(kind, seed ^ 1, count));
                if spec.name == "unusual" {
                    put_unusual(&mut gradient.storage, kind, rank);
                }
                gradient
            });
            // One type after another in blocks, then all types in turn.
            let name = match spec.name {
                "bias" | "line.at" | "unusual" => format!("mixed.{}.{block}", spec.name),
                name => format!("block{block}.{name}"),
            };
            parameters.push(Parameter { name, value, trainable: true, gradient });
        }
    }
    for (name, kind) in [("block1.counts", Kind::Int64), ("µ.steps", Kind::Int), ("Bytes", Kind::Uint8)] {
        let value = Contiguous.source(kind, &[7, 17], |count| raw(kind, bits(rank as u64), count));
        parameters.push(Parameter { name: name.into(), value, trainable: false, gradient: None });
    }
    parameters
}

fn fill(kind: Kind, seed: u64, count: usize) -> Vec<u8> {
    storage_of(kind, &(0..count).map(|index| number(seed, index)).collect::<Vec<_>>())
}

/// Any bytes: in floating types not-a-numbers of all sorts among them.
fn raw(kind: Kind, seed: u64, count: usize) -> Vec<u8> {
    let bytes = (0..count * kind.elt_size_in_bytes()).map(|index| bits(seed ^ bits(index as u64)).to_le_bytes()[3]);
    match kind {
        Kind::Bool => bytes.map(|byte| byte & 1).collect(),
        _ => bytes.collect(),
    }
}

// ---- the crate's side ----------------------------------------------------------------------------------------------

/// A leaf with exactly this value, gradient and strides of both.
#[track_caller]
fn leaf(parameter: &Parameter) -> Tensor {
    let tensor = parameter.value.tensor();
    if !parameter.trainable {
        return tensor;
    }
    let tensor = tensor.set_requires_grad(true);
    if let Some(gradient) = &parameter.gradient {
        // Any gradient, through autograd, which is then made to lie where the wanted one lies.
        tensor.sum(tensor.kind()).backward();
        tensor.grad().set_data(&gradient.tensor());
        let set = tensor.grad();
        assert_eq!((set.size(), set.stride()), (gradient.size.clone(), gradient.stride.clone()), "{}", parameter.name);
        assert_eq!(bytes_of(&set), gradient.logical_bytes(), "{}", parameter.name);
    }
    tensor
}

fn digest(tensor: &Tensor) -> String {
    tensor_digest(tensor).unwrap().to_string()
}

fn carry_out(session: &mut SyncSession, inputs: &[Parameter]) -> RunResult {
    let parameters = Parameters::from_named(inputs.iter().map(|input| (input.name.clone(), leaf(input)))).unwrap();
    let had: Vec<bool> = parameters.iter().map(|(_, tensor)| tensor.grad().defined()).collect();
    let broadcast = session.broadcast_trainable_parameters(&parameters).unwrap();
    let _verified = session.assert_rank_equal(parameters.values(), "broadcast").unwrap();
    let report = session.synchronize_gradients(1, &parameters).unwrap();
    let gradients: Vec<(&str, Option<Tensor>)> =
        parameters.iter().map(|(name, tensor)| (name, Some(tensor.grad()).filter(Tensor::defined))).collect();
    let used: Vec<bool> = gradients.iter().map(|(_, gradient)| gradient.is_some()).collect();
    check_report(&report, &had, &used);
    let copies = gradients.iter().map(|(name, gradient)| (*name, gradient.as_ref().map(Tensor::shallow_clone)));
    let _verified = session.assert_rank_equal(copies, "gradients").unwrap();
    RunResult {
        values: parameters.iter().map(|(_, tensor)| bytes_of(tensor)).collect(),
        value_digests: parameters.iter().map(|(_, tensor)| digest(tensor)).collect(),
        broadcast_buckets: broadcast.buckets,
        used,
        gradients: gradients.iter().map(|(_, gradient)| gradient.as_ref().map(bytes_of)).collect(),
        gradient_digests: gradients.iter().map(|(_, gradient)| gradient.as_ref().map(digest)).collect(),
        buckets: report.buckets,
    }
}

#[track_caller]
fn check_report(report: &SyncReport, had: &[bool], used: &[bool]) {
    let count =
        |wanted: &dyn Fn(bool, bool) -> bool| had.iter().zip(used).filter(|(had, used)| wanted(**had, **used)).count();
    assert_eq!(report.active, count(&|_, used| used));
    assert_eq!(report.globally_unused, count(&|_, used| !used));
    assert_eq!(report.locally_absent, count(&|had, used| used && !had));
}

/// The names that differ between ranks, as the crate reports them.
fn differing_names(session: &mut SyncSession, check: &Check) -> Option<Vec<String>> {
    let named = check.iter().map(|(name, source)| (name.clone(), source.as_ref().map(Source::tensor)));
    match session.assert_rank_equal(named, "check") {
        Ok(_verified) => None,
        Err(SyncError::RanksDiffer(report)) => Some(report.tensors.iter().map(|tensor| tensor.name.clone()).collect()),
        Err(error) => panic!("{error}"),
    }
}

fn transport(run: Run) -> Transport {
    match run.transport {
        "flat" => Transport::Flat,
        _ => Transport::InPlace,
    }
}

/// What the crate's ranks come to.
#[track_caller]
fn crate_results(inputs: &[Inputs]) -> Vec<RankResult> {
    let world = inputs.len();
    let mut results: Vec<RankResult> =
        inputs.iter().map(|_| RankResult { runs: Vec::new(), checks: Vec::new(), digests: Vec::new() }).collect();
    for run in RUNS {
        let settings = |_: usize, builder: sft_sync::SessionBuilder| {
            builder.transport(transport(run)).bucket_bytes(run.bucket_bytes).in_place_bytes(run.in_place_bytes)
        };
        let by_rank = ranks_with(world, settings, |session| {
            let rank = session.rank();
            carry_out(session, &inputs[rank].parameters)
        });
        results.iter_mut().zip(by_rank).for_each(|(result, run)| result.runs.push(run));
    }
    let by_rank = common::ranks(world, |session| {
        let rank = session.rank();
        inputs[rank].checks.iter().map(|check| differing_names(session, check)).collect::<Vec<_>>()
    });
    results.iter_mut().zip(by_rank).for_each(|(result, checks)| result.checks = checks);
    results
}

// ---- comparing -----------------------------------------------------------------------------------------------------

/// Compares lists with one item for each name, and says where they part.
#[track_caller]
fn assert_all<T: PartialEq>(what: &str, names: &[&str], ours: &[T], theirs: &[T]) {
    assert_eq!((ours.len(), theirs.len()), (names.len(), names.len()), "{what}: how many");
    let parted: Vec<&str> =
        names.iter().zip(ours.iter().zip(theirs)).filter(|(_, (a, b))| a != b).map(|(name, _)| *name).collect();
    assert!(parted.is_empty(), "{what}: not as PyTorch has it: {parted:?}");
}

#[track_caller]
fn assert_same(at: &str, names: &[&str], ours: &RunResult, theirs: &RunResult) {
    assert_all(&format!("{at}: used"), names, &ours.used, &theirs.used);
    assert_all(&format!("{at}: values"), names, &ours.values, &theirs.values);
    assert_all(&format!("{at}: digests of values"), names, &ours.value_digests, &theirs.value_digests);
    assert_all(&format!("{at}: gradients"), names, &ours.gradients, &theirs.gradients);
    assert_all(&format!("{at}: digests of gradients"), names, &ours.gradient_digests, &theirs.gradient_digests);
    assert_eq!(ours.broadcast_buckets, theirs.broadcast_buckets, "{at}: buckets of the broadcast");
    assert_eq!(ours.buckets, theirs.buckets, "{at}: buckets of gradients");
}

/// The distance from one number to the next, relative to 1.
fn epsilon(kind: Kind) -> f64 {
    match kind {
        Kind::BFloat16 => f64::powi(2.0, -7),
        Kind::Half => f64::powi(2.0, -10),
        Kind::Float => f64::from(f32::EPSILON),
        Kind::Double => f64::EPSILON,
        other => unreachable!("{other:?} has no gradients"),
    }
}

/// The same number, or two that are none.
fn same_number(a: f64, b: f64) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

/// How many elements two orders of summation gave different values; none of them by more than rounding explains.
///
/// `gradients` are what the ranks put in, `name` by `name`.
#[track_caller]
fn count_reordered(at: &str, inputs: &[Inputs], one: &RunResult, other: &RunResult) -> usize {
    let by_rank: Vec<Vec<&Parameter>> = inputs.iter().map(|inputs| in_name_order(&inputs.parameters)).collect();
    let mut reordered = 0;
    for (index, (one, other)) in one.gradients.iter().zip(&other.gradients).enumerate() {
        let parameter = by_rank[0][index];
        let (Some(one), Some(other)) = (one, other) else { continue };
        let kind = parameter.value.kind;
        let summands: Vec<Vec<f64>> = by_rank
            .iter()
            .filter_map(|parameters| parameters[index].gradient.as_ref())
            .map(|gradient| doubles(&gradient.logical_bytes(), kind))
            .collect();
        for (element, (a, b)) in doubles(one, kind).into_iter().zip(doubles(other, kind)).enumerate() {
            let sum: f64 = summands.iter().map(|summand| summand[element]).sum();
            let magnitude: f64 = summands.iter().map(|summand| summand[element].abs()).sum();
            let label = || format!("{at}: {} [{element}]: {a:e} and {b:e}, about {sum:e}", parameter.name);
            reordered += usize::from(!same_number(a, b));
            if magnitude.is_finite() {
                // The crate counts ranks without a gradient, too: they add zeros.
                #[allow(clippy::cast_precision_loss)]
                let bound = (inputs.len() - 1) as f64 * epsilon(kind) * magnitude;
                assert!((a - b).abs() <= bound, "{}: not equal within {bound:e}", label());
                assert!((a - sum).abs() <= bound && (b - sum).abs() <= bound, "{}: no sum within {bound:e}", label());
            } else {
                assert!(same_number(a, b) && same_number(a, sum), "{}", label());
            }
        }
    }
    reordered
}

fn in_name_order(parameters: &[Parameter]) -> Vec<&Parameter> {
    let mut sorted: Vec<&Parameter> = parameters.iter().collect();
    sorted.sort_by_key(|parameter| &parameter.name);
    sorted
}

// ---- gradients, masks, broadcast, checks ---------------------------------------------------------------------------

fn small(seed: u64, kind: Kind, size: &[i64]) -> Source {
    Contiguous.source(kind, size, |count| raw(kind, seed, count))
}

/// Lists that are equal on all ranks, and lists that differ in one or several ways.
fn checks(rank: usize, world: usize) -> Vec<Check> {
    let last = rank + 1 == world;
    let held = |name: &str, source: Source| (name.to_string(), Some(source));
    let absent = |name: &str| (name.to_string(), None);
    let plain = || held("plain", small(1, Kind::Float, &[3, 5]));
    let mut flipped = small(2, Kind::BFloat16, &[71]);
    if last {
        flipped.storage[97] ^= 0x10;
    }
    let layout = if last { Transposed } else { Contiguous };
    let turned = |count: usize| storage_of(Kind::Float, &vec![0.5; count]);
    vec![
        vec![],
        vec![absent("absent"), plain()],
        vec![plain(), held("turned", layout.source(Kind::Float, &[4, 6], turned))],
        vec![plain(), held("flipped", flipped)],
        vec![plain(), held("shape", small(3, Kind::Int, if last { &[6, 2] } else { &[2, 6] }))],
        vec![
            // The same bytes under two types.
            held("dtype", small(4, if last { Kind::Int64 } else { Kind::Double }, &[9])),
            if last { absent("presence") } else { held("presence", small(5, Kind::Half, &[])) },
            plain(),
        ],
        if last { vec![plain()] } else { vec![plain(), held("unlisted", small(6, Kind::Int8, &[2]))] },
        if last { vec![plain(), absent("unlisted, absent")] } else { vec![plain()] },
        vec![held("each", small(rank as u64, Kind::Uint8, &[1])), plain()],
    ]
}

/// What each of these lists comes to.
fn expected_checks(world: usize) -> Vec<Option<Vec<String>>> {
    let differing: [&[&str]; 9] = [
        &[],
        &[],
        &[],
        &["flipped"],
        &["shape"],
        &["dtype", "presence"],
        &["unlisted"],
        &["unlisted, absent"],
        &["each"],
    ];
    differing
        .iter()
        .map(|names| names.iter().map(ToString::to_string).collect::<Vec<_>>())
        .map(|names| Some(names).filter(|names| world > 1 && !names.is_empty()))
        .collect()
}

/// The whole comparison, at one world size.
#[track_caller]
fn conforms(world: usize) {
    let inputs: Vec<Inputs> = (0..world)
        .map(|rank| Inputs { parameters: model(rank, world), checks: checks(rank, world), digests: Vec::new() })
        .collect();
    let theirs = peer::run(&inputs, &RUNS);
    let ours = crate_results(&inputs);

    let names: Vec<&str> = in_name_order(&inputs[0].parameters).iter().map(|parameter| &*parameter.name).collect();
    let roots: Vec<Vec<u8>> =
        in_name_order(&inputs[0].parameters).iter().map(|parameter| parameter.value.logical_bytes()).collect();
    for rank in 0..world {
        for (index, run) in RUNS.iter().enumerate() {
            let at = format!("rank {rank} of {world}, {run:?}");
            assert_same(&at, &names, &ours[rank].runs[index], &theirs[rank].runs[index]);
            assert_all(&format!("{at}: values of rank 0"), &names, &ours[rank].runs[index].values, &roots);
        }
        assert_eq!(ours[rank].checks, theirs[rank].checks, "rank {rank} of {world}: names that differ");
        assert_eq!(ours[rank].checks, expected_checks(world), "rank {rank} of {world}: names that differ");
    }

    let runs = &ours[0].runs;
    for (pair, settings) in runs.chunks_exact(2).zip(RUNS.chunks_exact(2)) {
        let at = format!("{world} ranks, buckets of {} bytes, both transports", settings[0].bucket_bytes);
        let reordered = count_reordered(&at, &inputs, &pair[0], &pair[1]);
        // One rank or two leave no choice of order; nor does a bucket for each tensor.
        let one_order = world <= 2 || settings[0].bucket_bytes == 1;
        assert_eq!(reordered == 0, one_order, "{at}: {reordered} elements of another value");
    }
    let buckets: Vec<usize> = runs.iter().map(|run| run.buckets).collect();
    assert!(buckets[0] > buckets[4] && buckets[4] > 1 && buckets[2] > buckets[0], "{buckets:?}");
}

#[test]
fn one_rank_does_what_pytorch_does() {
    conforms(1);
}

#[test]
fn two_ranks_do_what_pytorch_does() {
    conforms(2);
}

#[test]
fn three_ranks_do_what_pytorch_does() {
    conforms(3);
}

#[test]
fn four_ranks_do_what_pytorch_does() {
    conforms(4);
}

// ---- digests -------------------------------------------------------------------------------------------------------

/// Every element type that has plain bytes.
const KINDS: [Kind; 17] = [
    Kind::Uint8,
    Kind::Int8,
    Kind::Int16,
    Kind::Int,
    Kind::Int64,
    Kind::Half,
    Kind::Float,
    Kind::Double,
    Kind::ComplexHalf,
    Kind::ComplexFloat,
    Kind::ComplexDouble,
    Kind::Bool,
    Kind::BFloat16,
    Kind::Float8e5m2,
    Kind::Float8e4m3fn,
    Kind::Float8e5m2fnuz,
    Kind::Float8e4m3fnuz,
];

const SIZES: [&[i64]; 10] =
    [&[], &[0], &[0, 3], &[4, 0, 2], &[1], &[1009], &[1, 7, 1], &[5, 11], &[2, 3, 4], &[2, 3, 5, 7]];

const LAYOUTS: [Layout; 6] = [Contiguous, Transposed, ChannelsLast, Expanded, Sliced, OddOnes];

/// Every type, size and layout that go together; random bytes, so that not-a-numbers of every payload occur.
fn plain_sources() -> Vec<Source> {
    let mut sources = Vec::new();
    for kind in KINDS {
        for size in SIZES {
            for layout in LAYOUTS.into_iter().filter(|layout| layout.fits(size)) {
                let seed = sources.len() as u64;
                sources.push(layout.source(kind, size, |count| raw(kind, seed, count)));
            }
        }
    }
    for kind in FLOATS {
        for (rank, layout) in [Contiguous, Transposed, Sliced].into_iter().enumerate() {
            sources.push(layout.source(kind, &[37, 13], |count| {
                let mut storage = vec![0; count * kind.elt_size_in_bytes()];
                put_unusual(&mut storage, kind, rank);
                storage
            }));
        }
    }
    sources
}

/// Views that stand for the conjugate or the negative of what their memory holds. There is no negative of
/// complex32 in torch.
fn lazy_sources() -> Vec<Source> {
    let complex = [Kind::ComplexHalf, Kind::ComplexFloat, Kind::ComplexDouble];
    let real = [Kind::Half, Kind::BFloat16, Kind::Float, Kind::Double, Kind::Int, Kind::Int64];
    let bits = complex
        .into_iter()
        .flat_map(|kind| [(kind, true, false), (kind, true, true), (kind, false, true)])
        .filter(|(kind, _, negative)| !(*kind == Kind::ComplexHalf && *negative))
        .chain(real.into_iter().map(|kind| (kind, false, true)));
    let mut sources = Vec::new();
    for (kind, conjugate, negative) in bits {
        for (layout, size) in
            [(Contiguous, &[5_i64, 7][..]), (Transposed, &[3, 11]), (Sliced, &[13]), (Contiguous, &[])]
        {
            let seed = 7919 + sources.len() as u64;
            // Each half of a complex number is filled as a number of its own.
            let part = match kind {
                Kind::ComplexHalf => Kind::Half,
                Kind::ComplexFloat => Kind::Float,
                Kind::ComplexDouble => Kind::Double,
                other => other,
            };
            let parts = kind.elt_size_in_bytes() / part.elt_size_in_bytes();
            let source = layout.source(kind, size, |count| match kind {
                Kind::Int | Kind::Int64 => raw(kind, seed, count),
                _ => fill(part, seed, parts * count),
            });
            sources.push(Source { conjugate, negative, ..source });
        }
    }
    sources
}

fn describe(source: &Source) -> String {
    let Source { kind, size, stride, conjugate, negative, .. } = source;
    format!("{kind:?} {size:?} strides {stride:?} conjugate {conjugate} negative {negative}")
}

#[test]
fn digests_are_those_of_pytorch() {
    let plain = plain_sources();
    let lazy = lazy_sources();
    let digests: Vec<Source> = plain.iter().chain(&lazy).cloned().collect();
    let labels: Vec<String> = digests.iter().map(describe).collect();
    let names: Vec<&str> = labels.iter().map(String::as_str).collect();
    let inputs = Inputs { digests, ..Inputs::default() };
    let ours: Vec<String> = inputs.digests.iter().map(|source| digest(&source.tensor())).collect();
    let theirs = peer::run(std::slice::from_ref(&inputs), &[]).remove(0).digests;
    assert_all("digests", &names, &ours, &theirs);

    // Strides do not matter: the same as of the bytes in logical order.
    let packed: Vec<String> = plain
        .iter()
        .map(|source| digest(&Tensor::f_from_data_size(&source.logical_bytes(), &source.size, source.kind).unwrap()))
        .collect();
    assert_all("strides", &names[..plain.len()], &ours[..plain.len()], &packed);
    // Lazy bits do: a view that was not resolved would have the digest of what its memory holds.
    for (source, own) in lazy.iter().zip(&ours[plain.len()..]) {
        assert_ne!(
            *own,
            digest(&Source { conjugate: false, negative: false, ..source.clone() }.tensor()),
            "{source:?}"
        );
    }
}

// ---- layouts that mean nothing -------------------------------------------------------------------------------------

/// A tensor of one element is contiguous whatever its stride, also where it travels on its own.
#[test]
fn one_element_is_broadcast_whatever_its_stride() {
    let in_place = |_: usize, builder: sft_sync::SessionBuilder| builder.in_place_bytes(1);
    let received = ranks_with(2, in_place, |session| {
        let layout = if session.rank() == 0 { Contiguous } else { OddOnes };
        let value = layout.source(Kind::Float, &[1], |count| fill(Kind::Float, session.rank() as u64, count));
        let parameters = Parameters::from_named([("one", value.tensor().set_requires_grad(true))]).unwrap();
        session.broadcast_trainable_parameters(&parameters).map(|_| digest(parameters.iter().next().unwrap().1))
    });
    let received: Vec<String> = received.into_iter().collect::<sft_sync::Result<_>>().unwrap();
    assert_eq!(received[0], received[1]);
}
