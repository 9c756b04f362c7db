use super::*;

fn compile(source: &str) -> Result<ChatTemplate, TemplateError> {
    ChatTemplate::compile(source, vec![("bos_token", "<s>".to_owned())])
}

fn render(source: &str, messages: &[(&str, &str)]) -> Result<String, TemplateError> {
    let messages: Vec<Message> = messages
        .iter()
        .map(|&(role, content)| Message { role: role.to_owned(), content: content.to_owned() })
        .collect();
    compile(source)?.render(&messages, true)
}

#[test]
fn blocks_leave_no_line_behind() {
    let source = "{{ bos_token }}\n{% for message in messages %}\n  {% if message.role == 'user' %}\n{{ message['content'] | trim }}\n  {% endif %}\n{% endfor %}\n{{ unk_token }}{% if tools %}no{% endif %}{{ add_generation_prompt }}";
    assert_eq!(render(source, &[("user", " a "), ("tool", "b"), ("user", "c")]).unwrap(), "<s>\na\nc\nTrue");
}

#[test]
fn without_a_template_there_are_only_the_texts() {
    let mut on_disk = tempfile::NamedTempFile::new().unwrap();
    io::Write::write_all(&mut on_disk, &crate::gguf::writer::GgufWriter::new().bytes()).unwrap();
    let file = crate::gguf::ModelFile::open(on_disk.path()).unwrap();
    let template = ChatTemplate::from_gguf(file.metadata()).unwrap();
    let message = |content: &str| Message { role: "user".to_owned(), content: content.to_owned() };
    let messages = [message("Be brief."), message("<b>{{ 1 }}\n")];
    assert_eq!(template.render(&messages, true).unwrap(), "Be brief.\n\n<b>{{ 1 }}\n");
    assert_eq!(template.render(&[], true).unwrap(), "");
}

#[test]
fn python_methods_and_namespaces() {
    let source = "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.content.startswith('<') %}{% set ns.n = ns.n + 1 %}{% endif %}{% endfor %}{{ ns.n }}{{ messages[0].content.split('>')[-1].strip() }}{{ messages[1:] | length }}{{ messages[0].get('x', 'y') }}{% for m in messages[::-1] %}{{ loop.index0 }}{% endfor %}";
    assert_eq!(render(source, &[("user", "<a> b"), ("user", "<")]).unwrap(), "2b1y01");
}

#[test]
fn nothing_is_not_iterable() {
    let source = "{{ tools is iterable }} {{ 'a' is iterable }} {{ [] is iterable }} {{ messages is iterable }} {{ 1 is iterable }} {{ missing is iterable }}";
    assert_eq!(render(source, &[]).unwrap(), "False True True True False True");
}

#[test]
fn text_is_not_escaped() {
    assert_eq!(render("{{ messages[0].content }}", &[("user", "<b>&\"'")]).unwrap(), "<b>&\"'");
    let json = render("{{ messages | tojson }}", &[("user", "<b>\u{E9}\"")]).unwrap();
    assert_eq!(json, "[{\"role\": \"user\", \"content\": \"<b>\u{E9}\\\"\"}]");
    assert_eq!(render("{{ {'a': [1]} | tojson(indent=2) }}", &[]).unwrap(), "{\n  \"a\": [\n    1\n  ]\n}");
}

#[test]
fn a_refusal_is_told_in_its_own_words() {
    let result = render("{{ raise_exception('roles must alternate') }}", &[]);
    assert!(matches!(result, Err(TemplateError::Refused(text)) if text == "roles must alternate"));
    let within = "{% macro check(m) %}{{ raise_exception('no ' ~ m.role) }}{% endmacro %}{% for m in messages %}{{ check(m) }}{% endfor %}";
    assert!(
        matches!(render(within, &[("tool", "")]), Err(TemplateError::Refused(text)) if text == "no tool")
    );
}

#[test]
fn the_date_is_formatted() {
    let year = render("{{ strftime_now('%Y') }}", &[]).unwrap();
    assert!(year.len() == 4 && year.as_str() >= "2025", "{year}");
    assert!(render("{{ strftime_now('%d %b %Y') }}", &[]).is_ok());
    assert!(matches!(render("{{ strftime_now('%') }}", &[]), Err(TemplateError::Failed { .. })));
}

#[test]
fn the_training_tag_is_transparent() {
    let source = "{% for m in messages %}{%- generation -%} {{ m.content }} {%- endgeneration %}{% endfor %}{{ '{% generation' }}";
    assert_eq!(render(source, &[("user", "x")]).unwrap(), "x{% generation");
}

#[test]
fn what_is_no_template_is_refused_with_the_line() {
    let error = compile("a\n{% for x in %}").unwrap_err();
    assert!(matches!(error, TemplateError::Syntax { line: 2, .. }), "{error}");
    assert!(matches!(compile("{% unknowntag %}"), Err(TemplateError::Syntax { .. })));
    assert!(matches!(compile(&" ".repeat(MAX_TEMPLATE_BYTES + 1)), Err(TemplateError::TooLarge { .. })));
    assert!(matches!(
        render("\n\n{{ messages[0].a.b }}", &[("u", "")]),
        Err(TemplateError::Failed { line: 3, .. })
    ));
    assert!(matches!(render("{% include '/etc/passwd' %}", &[]), Err(TemplateError::Failed { .. })));
}

/// Time, memory and depth: whatever a hostile template tries ends as an error.
#[test]
fn hostile_templates_come_to_an_end() {
    let doubling = "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}";
    let loops = "{% for a in range(10000) %}{% for b in range(10000) %}{% endfor %}{% endfor %}";
    let output = "{% for a in range(100000) %}aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa{% endfor %}";
    for source in [doubling, loops, output, "{{ 'a' * 90000000 }}", "{{ range(99999999) | list }}"] {
        let result = render(source, &[]);
        assert!(
            matches!(result, Err(TemplateError::Exhausted | TemplateError::Failed { .. })),
            "{source}: {:?}",
            result.map(|text| text.len())
        );
    }
    let sharing =
        "{% set ns = namespace(x=[1]) %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}";
    assert!(render(&format!("{sharing}{{{{ ns.x | tojson }}}}"), &[]).is_err());
    assert!(render("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", &[]).is_err());
    let nested = format!("{{{{ {}1{} }}}}", "(".repeat(100_000), ")".repeat(100_000));
    assert!(matches!(compile(&nested), Err(TemplateError::Syntax { .. })));
}
