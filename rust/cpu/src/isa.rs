//! Which instruction set the kernels use: found at run time, or forced by `NORIA_CPU_ISA`.

use std::fmt;

/// An instruction set that there are kernels for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// Plain Rust: any CPU.
    Portable,
    /// AVX2, FMA and F16C.
    Avx2,
    /// These, and AVX-VNNI.
    AvxVnni,
    /// AVX-512 F and BW.
    Avx512,
    /// These, and AVX-512 VNNI.
    Avx512Vnni,
}

/// The variable that forces an instruction set.
pub const ISA_VARIABLE: &str = "NORIA_CPU_ISA";

/// What it may be.
pub const ISA_NAMES: &str = "portable, avx2, avx-vnni, avx512 or avx512-vnni";

/// Why an instruction set cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IsaError {
    /// No instruction set of that name.
    Unknown(String),
    /// This CPU does not have it.
    Missing(Isa),
}

impl Isa {
    /// All of them, the narrowest first.
    pub const ALL: [Isa; 5] = [
        Isa::Portable,
        Isa::Avx2,
        Isa::AvxVnni,
        Isa::Avx512,
        Isa::Avx512Vnni,
    ];

    /// The name that [`ISA_VARIABLE`] takes.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "avx2",
            Isa::AvxVnni => "avx-vnni",
            Isa::Avx512 => "avx512",
            Isa::Avx512Vnni => "avx512-vnni",
        }
    }

    /// Whether this CPU, and its system, run it.
    pub fn is_here(self) -> bool {
        match self {
            Isa::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => Isa::Avx2.is_here() && is_x86_feature_detected!("avxvnni"),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                Isa::Avx2.is_here()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni => Isa::Avx512.is_here() && is_x86_feature_detected!("avx512vnni"),
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }

    /// The widest that this CPU has.
    pub fn widest() -> Isa {
        *Isa::ALL
            .iter()
            .rfind(|isa| isa.is_here())
            .expect("portable is everywhere")
    }

    /// The one that [`ISA_VARIABLE`] names, else the widest.
    ///
    /// # Errors
    /// The variable names none, or one that this CPU does not have.
    pub fn chosen() -> Result<Isa, IsaError> {
        match std::env::var(ISA_VARIABLE) {
            Ok(name) if !name.is_empty() => Isa::named(&name),
            _ => Ok(Isa::widest()),
        }
    }

    /// The one of that name.
    ///
    /// # Errors
    /// There is none, or this CPU does not have it.
    pub fn named(name: &str) -> Result<Isa, IsaError> {
        let isa = Isa::ALL
            .into_iter()
            .find(|isa| isa.name() == name)
            .ok_or_else(|| IsaError::Unknown(name.to_owned()))?;
        if isa.is_here() {
            Ok(isa)
        } else {
            Err(IsaError::Missing(isa))
        }
    }
}

impl fmt::Display for IsaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            IsaError::Unknown(name) => {
                write!(f, "{ISA_VARIABLE} is {name:?}, but must be {ISA_NAMES}.")
            }
            IsaError::Missing(isa) => write!(
                f,
                "{ISA_VARIABLE} is {:?}, which this CPU does not have; the widest here is {:?}.",
                isa.name(),
                Isa::widest().name()
            ),
        }
    }
}

impl std::error::Error for IsaError {}
