//! How large the dimensions of keys are, as far as the weights tell.
//!
//! Some models have keys of which a few dimensions are a hundred times as large as the others (those of Qwen 2, by their bias).
//! In a cache of 8 bits these would leave nothing of the others that share their factor. So keys are divided by these
//! sizes before they are kept, and queries multiplied with them: the products are the same. Rotary positions turn pairs of
//! dimensions into each other, so both of a pair have one size, and it does not matter that keys are turned before.

use crate::config::DecoderConfig;
use crate::kernels::attention::Heads;

/// Of keys that go through a norm: they are as large as its weights, the same in each head.
pub(super) fn of_norm(config: &DecoderConfig, heads: Heads, norm: &[f32]) -> Box<[f32]> {
    let squares = norm.iter().map(|&weight| f64::from(weight).powi(2));
    let head: Vec<f64> = squares.collect();
    sizes(config, &head.repeat(heads.kv_heads))
}

/// Of keys that are a product with a normed row, whose numbers are as large as the norm's weights, and a bias. `row` writes a
/// row of the matrix; `bias` is that of queries, keys and values.
pub(super) fn of_matrix(
    config: &DecoderConfig,
    heads: Heads,
    row: &dyn Fn(usize, &mut [f32]),
    norm: &[f32],
    bias: Option<&[f32]>,
) -> Box<[f32]> {
    let mut weights = vec![0.0; norm.len()];
    let mut square = |index: usize| {
        row(index, &mut weights);
        let products = weights.iter().zip(norm).map(|(&weight, &norm)| f64::from(weight) * f64::from(norm));
        let bias = bias.map_or(0.0, |bias| f64::from(bias[heads.heads * heads.dim + index]));
        products.map(|product| product * product).sum::<f64>() + bias * bias
    };
    let squares: Vec<f64> = (0..heads.kv_heads * heads.dim).map(&mut square).collect();
    sizes(config, &squares)
}

/// The roots of mean squares, where those of a pair are one; 1 where there is nothing to tell.
fn sizes(config: &DecoderConfig, squares: &[f64]) -> Box<[f32]> {
    let half = config.rotary.dims as usize / 2;
    let of_head = |head: &[f64]| -> Vec<f32> {
        let of = |d: usize| match d {
            d if d < half => (head[d] + head[d + half]) / 2.0,
            d if d < 2 * half => (head[d - half] + head[d]) / 2.0,
            d => head[d],
        };
        let size = |d: usize| of(d).sqrt() as f32;
        (0..head.len()).map(|d| Some(size(d)).filter(|size| size.is_normal()).unwrap_or(1.0)).collect()
    };
    squares.chunks(config.head_dim as usize).flat_map(of_head).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::ModelFile;
    use crate::part::Part;
    use crate::synthetic::SyntheticModel;

    #[test]
    fn pairs_have_one_size_and_nothing_is_divided_by_nothing() {
        let file = tempfile::NamedTempFile::new().unwrap();
        SyntheticModel::default().write(file.path()).unwrap();
        let config = DecoderConfig::from_gguf(&ModelFile::open(file.path()).unwrap()).unwrap();
        let heads = Part::whole(&config).shape();
        let half = config.rotary.dims as usize / 2;
        let mut squares = vec![0.0; heads.kv_heads * heads.dim];
        squares[1] = 100.0;
        squares[heads.dim + half] = f64::INFINITY;
        let sizes = sizes(&config, &squares);
        assert_eq!((sizes.len(), sizes[1], sizes[1 + half]), (squares.len(), 50f32.sqrt(), 50f32.sqrt()));
        let others = sizes.iter().enumerate().filter(|(d, _)| ![1, 1 + half].contains(d));
        assert!(others.into_iter().all(|(_, &size)| size == 1.0), "{sizes:?}");

        let row = |row: usize, to: &mut [f32]| to.fill(row as f32);
        let mut bias = vec![0.0; (heads.heads + 2 * heads.kv_heads) * heads.dim];
        bias[heads.heads * heads.dim] = 30.0;
        let sizes = of_matrix(&config, heads, &row, &[0.5; 4], Some(&bias));
        // Of dimension d: 4 * (d * 0.5)^2.
        assert_eq!(sizes[0], ((900.0 + (half * half) as f64) / 2.0).sqrt() as f32);
        assert_eq!(of_norm(&config, heads, &vec![3.0; heads.dim]), vec![3.0; squares.len()].into());
    }
}
