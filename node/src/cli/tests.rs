use std::path::Path;

use super::*;

/// Each command's help, as it is printed. To accept a change: `UPDATE_HELP=1 cargo test -p shoal help`, then look at the
/// difference.
#[test]
fn help_is_as_it_was_read_last() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cli/help");
    let mut command = command().term_width(HELP_COLUMNS);
    command.build();
    let mut wrong = Vec::new();
    visit(&command, "shoal", &mut |name, text| {
        let path = folder.join(format!("{}.txt", name.replace(' ', "-")));
        if std::env::var_os("UPDATE_HELP").is_some() {
            std::fs::write(&path, text).unwrap();
        } else if std::fs::read_to_string(&path).unwrap_or_default() != text {
            wrong.push(name.to_owned());
        }
    });
    assert!(wrong.is_empty(), "the help of {wrong:?} has changed");
}

fn visit(command: &clap::Command, name: &str, see: &mut impl FnMut(&str, &str)) {
    let mut shown = command.clone();
    see(name, &shown.render_long_help().to_string());
    for inner in command.get_subcommands().filter(|inner| inner.get_name() != "help") {
        visit(inner, &format!("{name} {}", inner.get_name()), see);
    }
}

#[test]
fn the_definition_of_the_command_line_is_sound() {
    command().debug_assert();
}

#[test]
fn every_command_shows_examples() {
    let mut command = command();
    command.build();
    visit(&command, "shoal", &mut |name, text| {
        if name.split(' ').count() == 2 {
            assert!(text.contains("Examples:"), "{name}");
        }
    });
}

#[test]
fn values_that_make_no_sense_are_usage_errors() {
    for line in [
        "shoal",
        "shoal nonsense",
        "shoal up --offer many",
        "shoal up --swarm a/b",
        "shoal up --threads 0",
        "shoal serve",
        "shoal run m --temperature NaN",
        "shoal run m --temperature 2.1",
        "shoal serve m --slots 0",
        "shoal serve m --slots 257",
        "shoal serve m --parallel sideways",
        "shoal serve m --kv-type q4",
        "shoal bench decode --kv-type f32",
        "shoal demo --context 1",
        "shoal open soon",
        "shoal bench decode --runs 0",
        "shoal bench batch --sequences 0",
        "shoal models",
    ] {
        let error = Cli::try_parse_from(line.split(' ')).unwrap_err();
        assert_eq!(error.exit_code(), 2, "{line}");
    }
}

#[test]
fn a_number_out_of_its_range_is_refused_with_the_option_and_the_range() {
    for (line, option, range) in [
        ("shoal run m --temperature NaN", "--temperature", "from 0 to 2"),
        ("shoal run m --temperature -3", "--temperature", "from 0 to 2"),
        ("shoal serve m --slots 257", "--slots", "1..=256"),
        ("shoal up --threads 0", "--threads", "from 1 to 65535"),
        ("shoal bench decode --threads 70000", "--threads", "from 1 to 65535"),
    ] {
        let error = Cli::try_parse_from(line.split(' ')).unwrap_err().to_string();
        assert!(error.contains(option) && error.contains(range), "{error}");
    }
}
