//! Arrays that Python hands over: one sentence where one is not as it is read.

use numpy::{
    BorrowError, Element, PyArray, PyArrayMethods, PyReadonlyArray, PyReadwriteArray,
    PyUntypedArray, PyUntypedArrayMethods, ndarray::Dimension,
};
use pyo3::prelude::*;

use crate::errors;

/// Argument `name`, to be read.
pub(crate) fn read<'py, T: Element, D: Dimension>(
    name: &str,
    array: &Bound<'py, PyAny>,
) -> PyResult<PyReadonlyArray<'py, T, D>> {
    of_type::<T, D>(array)
        .ok_or("")
        .and_then(|array| array.try_readonly().map_err(why))
        .map_err(|why| refusal::<T, D>(name, array, why))
}

/// Argument `name`, to be written.
pub(crate) fn write<'py, T: Element, D: Dimension>(
    name: &str,
    array: &Bound<'py, PyAny>,
) -> PyResult<PyReadwriteArray<'py, T, D>> {
    of_type::<T, D>(array)
        .ok_or("")
        .and_then(|array| array.try_readwrite().map_err(why))
        .map_err(|why| refusal::<T, D>(name, array, why))
}

/// The array, if it is contiguous, of the right numbers and of as many dimensions.
fn of_type<'a, 'py, T: Element, D: Dimension>(
    array: &'a Bound<'py, PyAny>,
) -> Option<&'a Bound<'py, PyArray<T, D>>> {
    let array = array.cast().ok()?;
    array.is_c_contiguous().then_some(array)
}

fn why(error: BorrowError) -> &'static str {
    match error {
        BorrowError::NotWriteable => " that is read-only",
        _ => " that is in use elsewhere",
    }
}

#[cold]
fn refusal<T: Element, D: Dimension>(name: &str, array: &Bound<'_, PyAny>, why: &str) -> PyErr {
    let py = array.py();
    let given = match array.cast::<PyUntypedArray>() {
        Ok(array) => {
            let order = if array.is_c_contiguous() {
                ""
            } else {
                ", not in C order"
            };
            format!(
                "an array of {}, shape {:?}{order}{why}",
                array.dtype(),
                array.shape()
            )
        }
        Err(_) => match array.get_type().name() {
            Ok(class) => format!("of type {class}"),
            Err(error) => return error,
        },
    };
    let num_dimensions = match D::NDIM {
        Some(1) => " of 1 dimension".to_owned(),
        Some(num) => format!(" of {num} dimensions"),
        None => String::new(),
    };
    let numbers = numpy::dtype::<T>(py);
    let expected = format!("an array of {numbers}{num_dimensions}, in C order");
    errors::array(py, name, given, &expected)
}
