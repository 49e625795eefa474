//! `draw`: rows of weights on the host, drawn from.

use noria_cpu::{DRAW_CHUNK, noise};
use numpy::{Ix1, Ix2, PyArray1, PyUntypedArrayMethods};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::arrays;

/// Draws a place of each row.
#[pyfunction]
#[pyo3(signature = (weights, masses, seeds, positions, attempt, rows=None, floor=None))]
#[allow(
    clippy::too_many_arguments,
    reason = "rows of weights, and what chooses in them"
)]
pub(crate) fn draw<'py>(
    py: Python<'py>,
    weights: &Bound<'py, PyAny>,
    masses: &Bound<'py, PyAny>,
    seeds: &Bound<'py, PyAny>,
    positions: &Bound<'py, PyAny>,
    attempt: u64,
    rows: Option<&Bound<'py, PyAny>>,
    floor: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyArray1<i64>>> {
    let weights = arrays::read::<f32, Ix2>("weights", weights)?;
    let masses = arrays::read::<i64, Ix2>("masses", masses)?;
    let seeds = arrays::read::<i64, Ix1>("seeds", seeds)?;
    let positions = arrays::read::<i64, Ix1>("positions", positions)?;
    let rows = rows
        .map(|rows| arrays::read::<i64, Ix1>("rows", rows))
        .transpose()?;
    let floor = floor
        .map(|floor| arrays::read::<f32, Ix1>("floor", floor))
        .transpose()?;
    let (num, size) = (masses.shape()[0], weights.shape()[1]);
    let num_chunks = masses.shape()[1];
    let (weights, masses) = (weights.as_slice()?, masses.as_slice()?);
    let (seeds, positions) = (seeds.as_slice()?, positions.as_slice()?);
    let rows = rows.as_ref().map(|rows| rows.as_slice()).transpose()?;
    let floor = floor.as_ref().map(|floor| floor.as_slice()).transpose()?;
    let lengths = [
        seeds.len(),
        positions.len(),
        rows.map_or(num, <[_]>::len),
        floor.map_or(num, <[_]>::len),
    ];
    if size == 0
        || num_chunks != size.div_ceil(DRAW_CHUNK)
        || lengths.iter().any(|&length| length != num)
    {
        return Err(PyValueError::new_err(format!(
            "masses has shape [{num}, {num_chunks}], which does not fit {size} weights a row and lengths {lengths:?}."
        )));
    }
    let drawn = (0..num).map(|index| {
        let row = rows.map_or(index, |rows| rows[index] as usize);
        let weights = weights.chunks_exact(size).nth(row).ok_or_else(|| {
            PyValueError::new_err(format!(
                "weights has no row {row}, which is to be drawn from."
            ))
        })?;
        let noise = noise(seeds[index], positions[index], attempt);
        let masses = &masses[index * num_chunks..][..num_chunks];
        let floor = floor.map_or(f32::NEG_INFINITY, |floor| floor[index]);
        Ok(noria_cpu::draw(weights, masses, noise, floor) as i64)
    });
    Ok(PyArray1::from_vec(py, drawn.collect::<PyResult<_>>()?))
}
