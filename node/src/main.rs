//! The binary `shoal`; everything is in the library, where tests reach it.

use std::process::ExitCode;

fn main() -> ExitCode {
    shoal::cli::main(std::env::args_os())
}
