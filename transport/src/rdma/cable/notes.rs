//! What each side tells the other beside messages, and when the other is asked, or given up.

use std::time::Instant;

use super::head::{FRAME_HEAD_BYTES, Head};
use super::{CLASSES, Cable, CableError, NOTED, write};

impl Cable {
    /// A head of now, of no frame.
    pub(super) fn head(&self) -> Head {
        let mut head = Head {
            frame: [0; FRAME_HEAD_BYTES],
            incarnation: self.incarnation,
            number: 0,
            have: [0; CLASSES],
            posted: [0; CLASSES],
            note: false,
            asks: false,
            answers: false,
            lacks: [false; CLASSES],
            total: 0,
            offset: 0,
        };
        for (index, class) in self.classes.iter().enumerate() {
            class.report(&mut head, index);
        }
        head
    }

    /// A head of now is on its way.
    pub(super) fn told(&mut self) {
        self.owes_note = false;
        for class in &mut self.classes {
            class.unreported = 0;
        }
    }

    /// Whether word of the other side is due, and its clocks while none is: an idle cable is not a silent one.
    pub(super) fn is_word_due(&mut self, now: Instant) -> bool {
        let settled = self.is_settled();
        if settled {
            self.got_through = now;
        }
        let due = !settled || self.starved;
        if !due {
            (self.heard, self.asked) = (now, now);
        }
        due
    }

    /// Whether the other side has been silent for so long that it is to be asked, if not given up.
    fn is_late(&mut self, now: Instant) -> Result<bool, CableError> {
        // Polls are many, and their times few.
        if std::mem::replace(&mut self.looked, now) == now {
            return Ok(false);
        }
        let waits = self.is_word_due(now);
        let silent = now.saturating_duration_since(self.heard);
        if silent >= self.patience.silence {
            return Err(CableError::Silent(silent));
        }
        let stuck = now.saturating_duration_since(self.got_through);
        if stuck >= self.patience.silence {
            return Err(CableError::Stuck(stuck));
        }
        let last = self.heard.max(self.asked);
        Ok(waits && now.saturating_duration_since(last) >= self.patience.ask_after)
    }

    /// Notes that are due, and the other side's silence.
    pub(super) fn say(&mut self, now: Instant) -> Result<(), CableError> {
        let asks = self.is_late(now)?;
        // Half of a window is reported at once, so that the sender does not stand still.
        let tells = self.classes.iter().any(|class| class.unreported >= class.shape.depth);
        if !(asks || tells || self.owes_note || self.owes_answer) {
            return Ok(());
        }
        let Some(mut slot) = self.notes.pop() else { return Ok(()) };
        let answers = std::mem::take(&mut self.owes_answer);
        let head = Head { note: true, asks, answers, ..self.head() };
        if !write(&mut slot, &head, &[], self.exact) {
            return Err(CableError::Head("a slot without room for a head"));
        }
        self.classes[NOTED].post(slot)?;
        self.stats.notes += 1;
        self.told();
        if asks {
            self.asked = now;
        }
        Ok(())
    }
}
