//! Instruction data: reading it, the global batches, and each rank's share.

use std::path::Path;

use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use serde::Deserialize;
use tch::Tensor;

use crate::Outcome;
use crate::options::Training;

/// Used when no file is named.
const BUILT_IN: &str = include_str!("../data/instructions.jsonl");

/// Stands between prompt and response.
const ANSWER: i64 = 256;
/// Ends a response.
const END: i64 = 257;
/// Bytes and the two marks.
pub(crate) const VOCABULARY: i64 = 258;
/// A target that has no part in the loss: prompts and padding.
pub(crate) const IGNORED: i64 = -100;

/// One example in this many is held out.
const HELD_OUT_EVERY: usize = 10;
/// One prompt in this many counts as long.
const LONG_EVERY: usize = 16;
const FEWEST: usize = 20;

/// A prompt and the response to learn.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Example {
    prompt: String,
    response: String,
}

impl Example {
    /// Tokens that the loss is taken over: the response and its end.
    pub(crate) fn tokens(&self) -> u64 {
        self.response.len() as u64 + 1
    }

    /// Token positions that the model reads.
    fn positions(&self) -> usize {
        self.prompt.len() + 1 + self.response.len()
    }

    fn inputs(&self) -> impl Iterator<Item = i64> {
        bytes(&self.prompt).chain([ANSWER]).chain(bytes(&self.response))
    }

    /// For each input the token that follows it, if it belongs to the response.
    fn targets(&self) -> impl Iterator<Item = i64> {
        std::iter::repeat_n(IGNORED, self.prompt.len()).chain(bytes(&self.response)).chain([END])
    }
}

fn bytes(text: &str) -> impl Iterator<Item = i64> {
    text.bytes().map(i64::from)
}

/// Examples to train on and examples held out.
#[derive(Debug)]
pub(crate) struct Dataset {
    pub(crate) training: Vec<Example>,
    pub(crate) held_out: Vec<Example>,
    /// From this length in bytes on a prompt counts as long.
    pub(crate) long_prompt: usize,
}

impl Dataset {
    /// Reads a file, or what is built in. Every tenth example is held out.
    pub(crate) fn load(path: Option<&Path>, training: &Training) -> Outcome<Self> {
        let (name, bytes) = match path {
            None => ("the built-in data".to_string(), BUILT_IN.as_bytes().to_vec()),
            Some(path) => {
                let name = path.display().to_string();
                let bytes = std::fs::read(path).map_err(|error| format!("{name}: cannot be read: {error}"))?;
                (name, bytes)
            }
        };
        let examples = parse(&name, &bytes, usize::from(training.context))?;
        Self::split(&name, examples, training.batch)
    }

    fn split(name: &str, examples: Vec<Example>, batch: usize) -> Outcome<Self> {
        if examples.len() < FEWEST {
            return Err(format!("{name}: holds {} examples, at least {FEWEST} are needed", examples.len()).into());
        }
        let mut dataset = Self { training: Vec::new(), held_out: Vec::new(), long_prompt: 0 };
        for (index, example) in examples.into_iter().enumerate() {
            let part = if index % HELD_OUT_EVERY == 0 { &mut dataset.held_out } else { &mut dataset.training };
            part.push(example);
        }
        let count = dataset.training.len();
        if count < batch {
            return Err(format!("{name}: has {count} examples to train on, too few for one batch of {batch}").into());
        }
        let mut lengths: Vec<usize> = dataset.training.iter().map(|example| example.prompt.len()).collect();
        lengths.sort_unstable();
        dataset.long_prompt = lengths[count - 1 - count / LONG_EVERY];
        Ok(dataset)
    }

    /// All text, for the check that every rank has read the same.
    pub(crate) fn fingerprint(&self) -> Tensor {
        let mut text = Vec::new();
        for example in self.training.iter().chain(&self.held_out) {
            for part in [&example.prompt, &example.response] {
                text.extend_from_slice(&(part.len() as u64).to_le_bytes());
                text.extend_from_slice(part.as_bytes());
            }
        }
        Tensor::from_slice(&text)
    }

    /// Examples as one batch of tensors.
    pub(crate) fn collate(&self, examples: &[&Example]) -> Batch {
        let width = examples.iter().map(|example| example.positions()).max().unwrap_or(0);
        let padded = |row: &mut Vec<i64>, padding: i64, from: usize| row.resize(from + width, padding);
        let (mut inputs, mut targets) = (Vec::new(), Vec::new());
        for example in examples {
            let from = inputs.len();
            // Attention looks back only and padding comes last, so nothing ever looks at it.
            inputs.extend(example.inputs());
            padded(&mut inputs, END, from);
            targets.extend(example.targets());
            padded(&mut targets, IGNORED, from);
        }
        let long: Vec<f32> =
            examples.iter().map(|example| f32::from(u8::from(example.prompt.len() >= self.long_prompt))).collect();
        let rows = |tensor: Tensor| if examples.is_empty() { tensor } else { tensor.view([-1, width_of(width)]) };
        Batch {
            inputs: rows(Tensor::from_slice(&inputs)),
            targets: rows(Tensor::from_slice(&targets)),
            long: long.contains(&1.0).then(|| Tensor::from_slice(&long).view([-1, 1, 1])),
        }
    }
}

/// Lengths are bounded by the context, which is a `u16`.
fn width_of(width: usize) -> i64 {
    i64::try_from(width).unwrap_or(i64::MAX)
}

/// Examples padded to one length.
#[derive(Debug)]
pub(crate) struct Batch {
    /// Tokens, examples by positions.
    pub(crate) inputs: Tensor,
    /// What follows each of them, or [`IGNORED`].
    pub(crate) targets: Tensor,
    /// 1 for each example with a long prompt and 0 for the others; `None` if there is no such example.
    pub(crate) long: Option<Tensor>,
}

/// Reads JSON Lines; the first line that is not an example is refused by its number.
fn parse(name: &str, bytes: &[u8], context: usize) -> Outcome<Vec<Example>> {
    let mut examples = Vec::new();
    for (index, line) in bytes.split(|byte| *byte == b'\n').enumerate() {
        if line.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        let example = parse_line(line, context).map_err(|reason| format!("{name}, line {}: {reason}", index + 1))?;
        examples.push(example);
    }
    Ok(examples)
}

fn parse_line(line: &[u8], context: usize) -> Result<Example, String> {
    let text = std::str::from_utf8(line).map_err(|_| "is not UTF-8".to_string())?;
    let example: Example = serde_json::from_str(text).map_err(|error| reason(&error))?;
    if example.prompt.trim().is_empty() {
        return Err("the prompt is empty".into());
    }
    if example.response.trim().is_empty() {
        return Err("the response is empty".into());
    }
    let positions = example.positions();
    if positions > context {
        // Cutting it would teach the model to stop in the middle of a sentence.
        return Err(format!("prompt and response need {positions} positions, --context allows {context}"));
    }
    Ok(example)
}

/// Without the parser's own line number, which is always 1.
fn reason(error: &serde_json::Error) -> String {
    let message = error.to_string();
    let message = message.split(" at line ").next().unwrap_or_default();
    let kind = if error.is_data() { "not an example" } else { "not valid JSON" };
    format!("{kind}: {message} (column {})", error.column())
}

/// Global batches without end: they follow from the seed and from nothing else, least of all the number of ranks.
pub(crate) struct Batches {
    rng: StdRng,
    order: Vec<usize>,
    next: usize,
    size: usize,
}

impl Batches {
    /// Batches of `size` out of `count` examples.
    pub(crate) fn new(seed: u32, count: usize, size: usize) -> Self {
        Self { rng: StdRng::seed_from_u64(u64::from(seed)), order: (0..count).collect(), next: count, size }
    }
}

impl Iterator for Batches {
    type Item = Vec<usize>;

    fn next(&mut self) -> Option<Vec<usize>> {
        if self.next + self.size > self.order.len() {
            self.order.shuffle(&mut self.rng);
            self.next = 0;
        }
        let batch = self.order[self.next..self.next + self.size].to_vec();
        self.next += self.size;
        Some(batch)
    }
}

/// What belongs to `rank`: every `world_size`-th, beginning with its own number.
pub(crate) fn share<T>(all: impl IntoIterator<Item = T>, rank: usize, world_size: usize) -> Vec<T> {
    all.into_iter().skip(rank).step_by(world_size).collect()
}

#[cfg(test)]
mod tests {
    use super::{BUILT_IN, Batches, Dataset, END, Example, IGNORED, parse, share};

    const GOOD: &str = r#"{"prompt": "Name a letter.", "response": "b"}"#;

    fn example(prompt: &str, response: &str) -> Example {
        Example { prompt: prompt.into(), response: response.into() }
    }

    #[track_caller]
    fn assert_refused(line: &[u8], expected: &str) {
        let file = [GOOD.as_bytes(), b"\n\n", line, b"\n"].concat();
        let message = parse("my.jsonl", &file, 40).unwrap_err().to_string();
        assert!(message.starts_with("my.jsonl, line 3: "), "{message}");
        assert!(message.contains(expected), "{message}");
    }

    #[test]
    fn good_lines_are_read_and_blank_ones_passed_over() {
        let file = format!("{GOOD}\r\n\n{GOOD}\n");
        assert_eq!(parse("f", file.as_bytes(), 40).unwrap(), vec![example("Name a letter.", "b"); 2]);
    }

    #[test]
    fn bad_lines_are_refused_with_number_and_reason() {
        assert_refused(b"{\"prompt\": \"a\"", "not valid JSON: EOF while parsing");
        assert_refused(br#"["a", 1]"#, "not an example: invalid type: integer");
        assert_refused(br#"{"prompt": "a"}"#, "missing field `response`");
        assert_refused(br#"{"prompt": "a", "response": "b", "id": 1}"#, "unknown field `id`");
        assert_refused(br#"{"prompt": "a", "prompt": "b", "response": "c"}"#, "duplicate field `prompt`");
        assert_refused(br#"{"prompt": "a", "response": 1}"#, "invalid type: integer `1`");
        assert_refused(br#"{"prompt": "a", "response": " "}"#, "the response is empty");
        assert_refused(br#"{"prompt": "", "response": "b"}"#, "the prompt is empty");
        assert_refused(b"{\"prompt\": \"\xff\", \"response\": \"b\"}", "is not UTF-8");
        let long = format!(r#"{{"prompt": "a", "response": "{}"}}"#, "b".repeat(39));
        assert_refused(long.as_bytes(), "need 41 positions, --context allows 40");
    }

    #[test]
    fn too_few_examples_are_refused() {
        let few = Dataset::split("f", vec![example("a", "b"); 19], 1).unwrap_err();
        assert_eq!(few.to_string(), "f: holds 19 examples, at least 20 are needed");
        let batch = Dataset::split("f", vec![example("a", "b"); 20], 19).unwrap_err();
        assert_eq!(batch.to_string(), "f: has 18 examples to train on, too few for one batch of 19");
    }

    #[test]
    fn only_the_response_has_targets() {
        let dataset = Dataset::split("f", vec![example("ab", "c"); 20], 1).unwrap();
        let batch = dataset.collate(&[&example("ab", "c"), &example("a", "b")]);
        assert_eq!(batch.inputs.size(), [2, 4]);
        let targets: Vec<Vec<i64>> = Vec::try_from(&batch.targets).unwrap();
        let (b, c) = (i64::from(b'b'), i64::from(b'c'));
        assert_eq!(targets, [[IGNORED, IGNORED, c, END], [IGNORED, b, END, IGNORED]]);
    }

    #[test]
    fn built_in_data_is_good_and_has_no_prompt_twice() {
        let examples = parse("built in", BUILT_IN.as_bytes(), 320).unwrap();
        assert!(examples.len() >= 240, "{}", examples.len());
        let mut prompts: Vec<&str> = examples.iter().map(|example| example.prompt.as_str()).collect();
        prompts.sort_unstable();
        prompts.dedup();
        assert_eq!(prompts.len(), examples.len());
    }

    #[test]
    fn batches_follow_from_the_seed_and_shares_cover_them() {
        let first: Vec<_> = Batches::new(5, 10, 4).take(6).collect();
        assert_eq!(first, Batches::new(5, 10, 4).take(6).collect::<Vec<_>>());
        assert_ne!(first, Batches::new(6, 10, 4).take(6).collect::<Vec<_>>());
        let shares: Vec<_> = (0..3).map(|rank| share(0..7, rank, 3)).collect();
        assert_eq!(shares, [vec![0, 3, 6], vec![1, 4], vec![2, 5]]);
    }
}
