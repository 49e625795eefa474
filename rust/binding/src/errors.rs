//! The core's errors as the classes of `noria.errors`: one sentence, with the values as attributes.

use noria_core::{CommitError, ConfigError, PinError, Reject, ReplayError, ResizeError};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// `noria.errors.<class>(message, **attributes)`.
fn raise(
    py: Python<'_>,
    class: &str,
    message: String,
    fill: impl FnOnce(&Bound<'_, PyDict>) -> PyResult<()>,
) -> PyErr {
    let build = || {
        let attributes = PyDict::new(py);
        fill(&attributes)?;
        py.import("noria.errors")?
            .getattr(class)?
            .call((message,), Some(&attributes))
    };
    match build() {
        Ok(error) => PyErr::from_value(error),
        Err(error) => error,
    }
}

pub(crate) fn config(py: Python<'_>, error: ConfigError) -> PyErr {
    let ConfigError {
        name,
        value,
        expected,
    } = error;
    named(py, name, value.to_string(), expected)
}

/// What `word` stands for.
pub(crate) fn chosen<T: Copy>(
    py: Python<'_>,
    name: &str,
    word: &str,
    choices: &[(&str, T)],
) -> PyResult<T> {
    let found = choices.iter().find(|choice| choice.0 == word);
    found.map(|choice| choice.1).ok_or_else(|| {
        let words: Vec<&str> = choices.iter().map(|choice| choice.0).collect();
        let expected = format!("one of {}", words.join(", "));
        named(py, name, format!("{word:?}"), &expected)
    })
}

/// An option whose value is not one of a few words.
pub(crate) fn named(py: Python<'_>, name: &str, value: String, expected: &str) -> PyErr {
    let message = format!("{name} is {value}, but must be {expected}.");
    raise(py, "ConfigError", message, |attributes| {
        attributes.set_item("name", name)?;
        attributes.set_item("value", value)
    })
}

/// An array that is not as it is read.
pub(crate) fn array(py: Python<'_>, name: &str, value: String, expected: &str) -> PyErr {
    let message = format!("{name} is {value}, but must be {expected}.");
    raise(py, "ArrayError", message, |attributes| {
        attributes.set_item("name", name)?;
        attributes.set_item("value", value)
    })
}

pub(crate) fn resize(py: Python<'_>, error: ResizeError) -> PyErr {
    match error {
        ResizeError::NumBlocks { value, low, high } => named(
            py,
            "num_blocks",
            value.to_string(),
            &format!("from {low} to {high}"),
        ),
        ResizeError::RequestNeeds {
            num_blocks, value, ..
        } => named(
            py,
            "num_blocks",
            value.to_string(),
            &format!("at least {num_blocks}, which a request that was accepted and pins may need"),
        ),
        ResizeError::Pinned { block, value } => named(
            py,
            "num_blocks",
            value.to_string(),
            &format!("at least {}, as that block is pinned", block.0),
        ),
        ResizeError::Static => raise(
            py,
            "ConfigError",
            "The pool of a static batch is not resized.".into(),
            |attributes| {
                attributes.set_item("name", "num_blocks")?;
                attributes.set_item("value", py.None())
            },
        ),
    }
}

pub(crate) fn pin(py: Python<'_>, error: PinError) -> PyErr {
    match error {
        PinError::NotCached { num_tokens } => limited(
            py,
            "PinError",
            format!(
                "No leading block of the {num_tokens} tokens is in the prefix cache, filled by a committed step."
            ),
            0,
            1,
        ),
        PinError::TooMany { num_blocks, limit } => limited(
            py,
            "PinError",
            format!(
                "{num_blocks} blocks would be pinned, but the watermark and accepted requests leave {limit}."
            ),
            num_blocks,
            limit,
        ),
    }
}

pub(crate) fn reject(py: Python<'_>, reject: Reject) -> PyErr {
    match reject {
        Reject::EmptyPrompt => raise(
            py,
            "EmptyPromptError",
            "The prompt is empty, but needs at least 1 token.".into(),
            |attributes| {
                attributes.set_item("value", 0)?;
                attributes.set_item("limit", 1)
            },
        ),
        Reject::TokenOutOfRange {
            token,
            position,
            vocab_size,
        } => limited(
            py,
            "TokenOutOfRangeError",
            format!(
                "Prompt token {position} is id {token}, but the vocabulary has ids 0 to {}.",
                vocab_size - 1
            ),
            token,
            vocab_size,
        ),
        Reject::PromptTooLong { num_tokens, limit } => limited(
            py,
            "PromptTooLongError",
            format!(
                "The prompt has {num_tokens} tokens, but max_model_len leaves room for {limit} and one of output."
            ),
            num_tokens as i64,
            limit,
        ),
        Reject::MaxTokens { value } => limited(
            py,
            "MaxTokensError",
            format!("max_tokens is {value}, but must be at least 1."),
            value,
            1,
        ),
        Reject::NeverFits { num_blocks, limit } => limited(
            py,
            "NeverFitsError",
            format!(
                "Prompt and output need {num_blocks} KV blocks, but the whole pool, less what is pinned, has {limit}."
            ),
            num_blocks,
            limit,
        ),
        Reject::QueueFull { limit } => limited(
            py,
            "QueueFullError",
            format!("{limit} requests wait already, and no more may."),
            limit,
            limit,
        ),
        Reject::QueueTokensFull { num_tokens, limit } => limited(
            py,
            "QueueFullError",
            format!("{num_tokens} tokens would wait with this prompt, but {limit} may."),
            num_tokens as i64,
            limit as i64,
        ),
    }
}

fn limited(
    py: Python<'_>,
    class: &str,
    message: String,
    value: impl Into<i64>,
    limit: impl Into<i64>,
) -> PyErr {
    let (value, limit) = (value.into(), limit.into());
    raise(py, class, message, |attributes| {
        attributes.set_item("value", value)?;
        attributes.set_item("limit", limit)
    })
}

pub(crate) fn commit(py: Python<'_>, error: CommitError) -> PyErr {
    let message = match error {
        CommitError::Unknown { step } => format!("Step {} was never planned.", step.0),
        CommitError::OutOfOrder { step, oldest } => {
            format!(
                "Step {} was committed, but step {} comes first.",
                step.0, oldest.0
            )
        }
        CommitError::NumRows { given, expected } => {
            format!("num_ids has {given} entries, but the step has {expected} rows.")
        }
        CommitError::NumIds { row, given, limit } => {
            format!("Row {row} gave {given} ids, but may give 0 to {limit}.")
        }
        CommitError::Total { given, expected } => {
            format!("{given} ids were given, but num_ids adds up to {expected}.")
        }
        CommitError::TokenOutOfRange { token, vocab_size } => {
            format!(
                "Id {token} was sampled, but the vocabulary has ids 0 to {}.",
                vocab_size - 1
            )
        }
    };
    raise(py, "CommitError", message, |_| Ok(()))
}

pub(crate) fn replay(py: Python<'_>, error: ReplayError) -> PyErr {
    match error {
        ReplayError::Malformed { at } => {
            PyValueError::new_err(format!("The recording stops making sense at byte {at}."))
        }
        ReplayError::Config(error) => config(py, error),
    }
}
