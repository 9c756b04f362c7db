"""300 strings on which tokenizers tend to differ: scripts, code, emoji, white space, special tokens."""

SCRIPTS = """Hello, world!
The quick brown fox jumps over the lazy dog.
I'm sure they'll say we've done what you'd asked; it's Bob's, isn't it?
DON'T SHOUT'S WE'LL YOU'RE I'VE I'M HE'D
Voix ambiguë d'un cœur qui, au zéphyr, préfère les jattes de kiwis.
Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.
El pingüino Wenceslao hizo kilómetros bajo exhaustiva lluvia y frío, ¿añoraba?
Luís argüia à Júlia que «brações, fé, chá, óxido, pôr, zângão» eram palavras do português.
Quel vituperabile xenofobo zelante assaggia il whisky ed esclama: alleluja!
Pchnąć w tę łódź jeża lub ośm skrzyń fig.
Příliš žluťoučký kůň úpěl ďábelské ódy.
Árvíztűrő tükörfúrógép, jó foxim és don Quijote.
Gheorghe, obezul, a reuşit să obţină jucându-se un flux în Quebec de o mie kilowaţioră.
Pijamalı hasta yağız şoföre çabucak güvendi. İstanbul ile ısı.
Høj bly gom vandt fræk sexquiz på wc.
Flygande bäckasiner söka hwila på mjuka tuvor.
Kæmi ný öxi hér, ykist þjófum nú bæði víl og ádrepa.
Põdur Zagrebi tšellomängija-följetonist Ciqo külmetas kehvas garaažis.
Glāžšķūņa rūķīši dzērumā čiepj Baha koncertflīģeļu vākus.
Įlinkdama fechtuotojo špaga sublykčiojusi pragręžė apvalų arbūzą.
Съешь же ещё этих мягких французских булок, да выпей чаю.
Чуєш їх, доцю, га? Кумедна ж ти, прощайся без ґольфів!
Ах чудна българска земьо, полюшвай цъфтящи жита.
Љубазни фењерџија чађавог лица хоће да ми покаже штос.
Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.
Τάχιστη αλώπηξ βαφής ψημένη γη, δρασκελίζει υπέρ νωθρού κυνός
Հայաստանի մայրաքաղաքը Երևանն է։
ვეპხის ტყაოსანი შოთა რუსთაველი
דג סקרן שט בים מאוכזב ולפתע מצא חברה
שָׁלוֹם עֲלֵיכֶם
نص حكيم له سر قاطع وذو شأن عظيم مكتوب على ثوب أخضر ومغلف بجلد أزرق
صِف خَلقَ خَودِ كَمِثلِ الشَمسِ إِذ بَزَغَت
یہ اردو کا ایک جملہ ہے۔ کیا آپ سمجھے؟
ذات یکتا را ستایش که سخن گفتن آموخت.
ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण का सर्वनाश करने वाले
विद्यार्थी पुस्तकालय में पढ़ते हैं। १२३४५
আমি বাংলায় গান গাই, আমি বাংলার গান গাই। ৬৭৮
ਪੰਜਾਬੀ ਇੱਕ ਭਾਸ਼ਾ ਹੈ
ગુજરાતી ભાષા
தமிழ் மொழி மிகவும் பழமையானது.
తెలుగు భాష అందమైనది
ಕನ್ನಡ ನಾಡು
മലയാളം കേരളത്തിന്റെ ഭാഷയാണ്
සිංහල අකුරු
ภาษาไทยไม่มีช่องว่างระหว่างคำ ๑๒๓
ພາສາລາວ
မြန်မာဘာသာ
ភាសាខ្មែរ ១២៣
བོད་སྐད་
ᠮᠣᠩᠭᠣᠯ ᠬᠡᠯᠡ
ኢትዮጵያ ውብ አገር ናት።
ᏣᎳᎩ ᎦᏬᏂᎯᏍᏗ
いろはにほへと ちりぬるを わかよたれそ つねならむ
イロハニホヘト ｲﾛﾊﾆﾎﾍﾄ １２３ＡＢＣ
東京都は日本の首都です。「こんにちは」と言った。
天地玄黃，宇宙洪荒。日月盈昃，辰宿列張。
我能吞下玻璃而不伤身体。
키스의 고유조건은 입술끼리 만나야 하고 특별한 기술은 필요치 않다.
한글 자모 ㄱㄴㄷ ᄒᆞᆫ글
𐌰𐌱𐌲 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝒽𝑒𝓁𝓁𝑜 𝟘𝟙𝟚
𒀀𒀁𒀂 𓀀𓀁 𐎀𐎁
Tiếng Việt có sáu thanh điệu: ngang, huyền, sắc, hỏi, ngã, nặng.
Yẹ̀rẹ́ àti Ọ̀yọ́
Kia ora koutou katoa; ʻŌlelo Hawaiʻi
Esperanto: eĥoŝanĝo ĉiuĵaŭde
Latin ﬁ ﬂ ﬀ ligatures, ½ ¼ ² ³ ¹ № ™ © ® ª º
IPA: ðə ˈkwɪk ˈbɹaʊn ˈfɑks
Roman Ⅷ ⅻ, circled ① ② ⓐ, fractions ⅓ ⅞, Arabic-Indic ٣٤٥ ۳۴۵""".split("\n")

CODE = [
    "def f(x: int) -> int:\n    return x ** 2  # square\n",
    "for i in range(10):\n\tif i % 2 == 0:\n\t\tprint(f\"{i:>4}\")\n",
    "fn main() -> Result<(), Box<dyn Error>> {\n    println!(\"{:?}\", vec![1, 2, 3]);\n    Ok(())\n}",
    "impl<'a, T: ?Sized + 'static> Trait for &'a mut T where T: Send {}",
    "#include <stdio.h>\nint main(void) { printf(\"%d\\n\", 42); return 0; }",
    "template <typename T, size_t N> constexpr auto f(T (&a)[N]) noexcept -> decltype(a[0]);",
    "const f = async ({a, b = 1, ...rest}) => { await Promise.all([a?.b ?? c]); };",
    "if (x === null || typeof y !== 'undefined') { x += y--; }",
    "<!DOCTYPE html>\n<html lang=\"en\"><body class='a b'>&nbsp;&lt;p&gt;</body></html>",
    "SELECT u.id, COUNT(*) AS n FROM users u LEFT JOIN orders o ON o.user_id = u.id WHERE u.age >= 18 GROUP BY 1;",
    "{\"name\": \"shoal\", \"list\": [1, 2.5, -3e-7, true, null], \"nested\": {\"k\": \"v\\n\"}}",
    "- key: value\n  list:\n    - one\n    - two\n",
    "[package]\nname = \"x\"\nversion = \"0.1.0\"\n",
    "#!/bin/sh\nset -eu; for f in \"$@\"; do echo \"${f%.*}\" | sed -e 's/a/b/g' >> out.txt 2>&1; done",
    "grep -rnE '^\\s*(fn|struct)\\b' --include='*.rs' . | wc -l",
    "\\begin{equation} \\int_0^\\infty e^{-x^2}\\,dx = \\frac{\\sqrt{\\pi}}{2} \\end{equation}",
    "# Heading\n\n* item **bold** _it_\n* `code`\n\n```python\nprint(1)\n```\n",
    "a && b || !c; d ? e : f; g |= h << 2; i >>>= 3; j ^= ~k;",
    "/* block\n * comment\n */ // line",
    "x = y  if z  else  w",
    "class A(B):\n    \"\"\"Doc.\"\"\"\n\n    def __init__(self, *args, **kwargs):\n        super().__init__(*args, **kwargs)\n",
    "let s = r#\"raw \"string\" \\n\"#;",
    "0x1F 0b1010 0o17 1_000_000 3.14159f64 6.022e23 .5 1.",
    "user@example.com https://example.org/a/b?c=d&e=%20f#g ftp://[::1]:21/",
    "C:\\Users\\name\\file.txt /usr/local/lib/libfoo.so.1.2.3 ~/.config",
    "\tcase 0:\n\t\tbreak;\n\tdefault:\n\t\tgoto out;\n",
    "public static void main(String[] args) throws Exception { System.out.println(args.length); }",
    "λ x → x + 1; ∀ε>0 ∃δ>0: |x−a|<δ ⇒ |f(x)−f(a)|<ε",
    "package main\n\nimport \"fmt\"\n\nfunc main() {\n\tfmt.Println(\"hi\")\n}\n",
    "diff --git a/x b/x\n@@ -1,3 +1,4 @@\n-old\n+new\n context",
    "2026-11-30T12:34:56.789Z [INFO] module::path - msg=\"a b\" id=0xdeadbeef",
    "git commit -m 'x: y' && git push --force-with-lease origin HEAD:refs/heads/main",
    "camelCaseIdentifier snake_case_identifier SCREAMING_SNAKE kebab-case PascalCase x1y2z3",
    "assert_eq!(a[..n], b[n..]); // ...",
    "%s %d %05.2f %-10s {} {0} {name!r:>{width}} ${HOME} $((1+2))",
    "(((((((((([[[[[[{{{{{<<<<>>>>}}}}}]]]]]]))))))))))",
    "=================== ------- _______ ####### ******* ....... ~~~~~ ;;;;; :::::",
    "print('héllo wörld', 'こんにちは', '🎉')",
    "regex: (?<=a)b(?!c)\\d{2,3}[^\\w\\s]+$",
    "\"\\u00e9\\x41\\t\\\\\"",
]

EMOJI = [
    "😀", "😀😀😀", "👍🏽 thumbs", "👩‍🚀 astronaut", "👨‍👩‍👧‍👦 family", "🏳️‍🌈🏴‍☠️", "🇫🇷🇩🇪🇯🇵", "❤️ vs ❤", "☕️☃️", "1️⃣2️⃣#️⃣",
    "🤷🏿‍♀️ shrug", "I ❤️ 🍕 and 🎸!", "🫠🫡🥹🪿", "🧑🏻‍❤️‍💋‍🧑🏿", "text🙂text", " 🙂 ", "🙂\n🙂", "🎉🎊✨🔥💯", "→ ← ↑ ↓ ⇒ ⟶ ➜", "♠♥♦♣ ♔♕ ☯☮",
    "👁️‍🗨️", "🏴󠁧󠁢󠁥󠁮󠁧󠁿 England", "(╯°□°)╯︵ ┻━┻", "¯\\_(ツ)_/¯", "ʕ•ᴥ•ʔ", "🀄🃏🎴", "🅰️🆎🆗", "⌚⏰⏳", "🕐🕑🕒", "🏻🏼🏽🏾🏿",
    "𝕏 🆇 🅧", "🫱🏻‍🫲🏿", "🐈‍⬛🐕‍🦺", "⚠️ Warning: 🚧", "✅ done ❌ not", "▁▂▃▄▅▆▇█ ░▒▓", "│┌┐└┘├┤┬┴┼ ═║╔╗", "🟥🟧🟨🟩", "👾🤖👽", "🥇1st 🥈2nd",
]

WHITE_SPACE = [
    "", " ", "  ", "   ", "    ", "        ", "\n", "\n\n", "\n\n\n", "\t", "\t\t", "\r\n", "\r", " \n", "\n ", "  \n  ", "\n\t\n",
    " a", "a ", "  a", "a  ", "a b", "a  b", "a   b", "a\nb", "a\n\nb", "a \n b", "a\tb", "a\t b", "  1", "   12  3 ", "\n1", "1 \n", "a\u00a0b", "\u00a0\u00a0x",
    "\u3000全角\u3000スペース", "a\u2003b\u2009c\u200ad", "zero\u200bwidth\u200cjoin\u200der\u2060", "\ufeffBOM first", "line\u2028sep\u2029para", "a\u0085b", "\x0b\x0c vertical",
    "trailing   ", "   leading", "\n\n\n\n\n\n\n\n", " " * 31 + "x", "x" + " " * 64 + "y", "\t" * 9 + "z", "a" + "\n" * 17 + "b", " \t \t \n \t", "' s 't 're", "it 's  'll", "tab\there\tand  there",
    "mixed \u2002\u2003 spaces \u202f here", "a\r\n\r\nb", "end.\n\nNew paragraph.  Two spaces.",
]

SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_start|>user\nHi<|im_end|>\n", "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "a<|im_end|>b", " <|im_end|> ", "<|im_end|><|im_end|>", "<|im_start|", "|im_start|>", "<|im_start|><|im_start", "<<|im_end|>>", "<|IM_END|>", "<|im_end |>", "< |im_end|>",
    "<repo_name>shoal", "<reponame><file_sep><filename>a.rs<gh_stars>100", "<issue_start><issue_comment>text<issue_closed>", "<jupyter_start><jupyter_text>t<jupyter_code>c<jupyter_output>o<jupyter_script>",
    "<empty_output>", "<empty_output", "x<file_sep>\n\ny", "  <|im_start|>  ", "\n<|im_end|>\n", "<s></s><unk><pad>", "[INST] hi [/INST]", "<|eot_id|><end_of_turn>", "5<|im_end|>5", "🙂<|im_end|>🙂", "<|endoftext|>The end<|endoftext|>",
]

NUMBERS_AND_MARKS = [
    "0", "1234567890", "3.14159265358979", "1,234,567.89", "$1,000 €5 £6 ¥7 ₹8 ₿9", "50%", "1/2 + 3/4 = 5/4", "12:34:56", "2026-11-30", "+1 (555) 123-4567", "007", "1e-10", "v1.2.3-rc.4+build.5", "IPv6 fe80::1%eth0", "a1b22c333", "１２３", "Ⅳ+Ⅵ", "x²+y³=z⁴",
    "...", "…", "?!?!", "!!!", "---", "--flag=value", "\"quoted\" 'single' “curly” ‘curly’ «guillemets» „low“", "(a) [b] {c} <d>", "a;b:c,d.e", "semi ; colon", "@user #tag &amp;", "~`^|\\", "em—dash en–dash minus−", "a/b\\c", "* * *", "e.g., i.e., etc.", "Mr. O'Neill-Smith's",
]

EDGES = [
    "\x00", "a\x00b", "\x01\x02\x03\x1b[0m\x7f", "e\u0301 vs \u00e9", "n\u0303o\u0308", "Z\u0351\u0348\u033ca\u0321l\u0334g\u0335o\u0338", "\ufffd", "\ue000\uf8ff private", "\ufff9\uffff\U0010ffff", "\u202eright to left\u202c", "\u00ad soft\u00adhyphen", "ÀÁÂÃÄÅÆÇÈÉÊËÌÍÎÏÐÑÒÓÔÕÖ×ØÙÚÛÜÝÞß", "\u0080\u0081\u009f",
    "a" * 200, "ab" * 100, "Aa" * 50, "supercalifragilisticexpialidocious", "Donaudampfschifffahrtsgesellschaftskapitän", "Lopadotemachoselachogaleokranioleipsano", "ǅ ǈ ǋ ᾈ", "ẞ ſ K Å", "ﷺ ﷽", "𠀀𠀁 𪚥", "日本\u0301語", "\U000e0001\U000e0020", "ᄀᄀᄀ각ᆨᆨ", "\u0e33\u0e4d",
    "The Treaty of Westphalia (1648) ended the Thirty Years' War, in which some 8,000,000 people died.",
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness.",
    "Q: What's 17 × 23?\nA: 17 × 23 = 391.",
    "Once upon a time there were four little Rabbits, and their names were—Flopsy, Mopsy, Cotton-tail, and Peter.",
    "Dear Sir or Madam,\n\nI am writing to complain about item no. 4711.\n\nYours faithfully,\n\tJ. Doe",
    "ЁёЪъ mixed with English and 漢字 and العربية in one line, 12 times!",
    "To be, or not to be: that is the question:\nWhether 'tis nobler in the mind to suffer",
]

# What SentencePiece and Gemma's vocabulary treat in ways of their own.
PIECES = [
    "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n", "<bos>a<eos>", " <bos> a", "<unused7> <mask>", "<start_of_image>x<end_of_image>", "<h1>Title</h1> <b> bold </b>",
    "▁", "a▁b", "▁▁▁", "▁ ▁", " ▁a", "<0x41>", "<0x0A><0xE2>", "\n<h2>\n\n", "aaa", "aaaa", "aaaaa", "abababab", "nnnnnnnn", "eeeee eeeee", "------------", "hahahahaha", " " * 40 + "\n" * 40,
    "ᏸᏹ ꬰꭑ 𐐀𐐨", "ⴀⴁⴂ ꙀꙂ", "𞤀𞤁𞤂", "a\u0300\u0301\u0302\u0303", "x \t y \t\t z", "the the  the   the", "　　　", "\u2003\u2003", "<|fim_prefix|>def f():<|fim_suffix|><|fim_middle|>", "<tool_call>{}</tool_call>",
]

STRINGS = SCRIPTS + CODE + EMOJI + WHITE_SPACE + SPECIAL + NUMBERS_AND_MARKS + EDGES + PIECES

if __name__ == "__main__":
    print(len(STRINGS), len(set(STRINGS)))
