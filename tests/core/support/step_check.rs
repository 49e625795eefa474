//! What must hold of every step that the core plans, beside what its buffer says of itself.

use noria_core::{Admission, Config, EventKind, Seat, StepId, digest, flags};

use super::view::{RowView, StepView};
use super::world::World;

fn is_static(config: &Config) -> bool {
    matches!(
        config.admission,
        Admission::StaticGang | Admission::StaticPadded
    )
}

impl World {
    pub(super) fn take_step(&mut self, id: StepId) {
        let layout = *self.core.layout();
        let view = StepView::read(&layout, &self.buffer, &mut self.holders);
        assert_eq!(view.id, id.0);
        assert!(id.0 > self.last_step, "step ids are never reused");
        self.last_step = id.0;
        view.check(&self.config, &layout, &self.buffer);
        self.check_tables(&view);
        self.check_gains(&view);
        self.check_rows(&view);
        let is_confined = self.is_confined_now();
        if is_confined {
            self.check_confined(&view);
        }
        self.is_confined.insert(id.0, is_confined);
        self.seen.confined_steps += u64::from(is_confined);
        for row in &view.rows {
            self.seen.device_starts += u64::from(row.has(flags::DEVICE_START));
            self.seen.listed_drafts += u64::from(row.has(flags::DRAFT_IDS));
            self.seen.ghosts += u64::from(row.has(flags::GHOST));
            self.seen.padding += u64::from(row.has(flags::PADDING));
            self.seen.chunks += u64::from(row.has(flags::LISTED) && !row.has(flags::SAMPLES));
        }
        self.digests.push(digest(&layout, &self.buffer));
        self.num_steps += 1;
        self.seen.moves += view.moves.len() as u64;
        if self.config.contiguous && !view.moves.is_empty() {
            self.seen.slides += 1;
        }
        // From this step on nothing beyond the pool is read, but by its own moves.
        let extent = if self.core.is_shrinking() {
            None
        } else {
            Some(self.config.num_blocks)
        };
        self.runner.push(id, view, &self.buffer, extent);
    }

    /// Each gain is an admission that events tell, with the tokens that were found for it.
    fn check_gains(&self, view: &StepView) {
        let entered: Vec<(u64, i64, i64)> = self
            .core
            .events()
            .iter()
            .filter(|event| matches!(event.kind, EventKind::Admitted | EventKind::Resumed))
            .map(|event| (event.handle.to_bits(), event.first, event.second))
            .collect();
        let gained: Vec<(u64, i64, i64)> = view
            .gained
            .iter()
            .map(|gain| (gain.handle, gain.num_computed_tokens.into(), view.id as i64))
            .collect();
        assert_eq!(gained, entered);
        for gain in &view.gained {
            let account = &self.ledger.accounts[&gain.handle];
            assert_eq!(gain.num_prompt_tokens as usize, account.ask.prompt.len());
            assert_eq!(gain.num_tokens, account.num_tokens());
            match view.row_of(gain.handle) {
                Some(row) => assert_eq!(row.start, gain.num_computed_tokens),
                None => assert!(is_static(&self.config), "who enters gets tokens"),
            }
        }
    }

    fn check_rows(&self, view: &StepView) {
        for row in view.sequence_rows() {
            let account = &self.ledger.accounts[&row.handle];
            let is_ghost = row.has(flags::GHOST);
            assert_eq!(is_ghost, !account.is_live(), "a ghost is who has ended");
            assert!(!is_ghost || self.config.admission == Admission::StaticPadded);
            assert!(
                !is_ghost || !row.has(flags::HOST_MASKED),
                "a ghost needs no mask"
            );
        }
        let is_partial = |row: &&RowView| row.has(flags::LISTED) && !row.has(flags::SAMPLES);
        let num_partial = view.rows.iter().filter(is_partial).count();
        assert!(
            num_partial <= self.config.max_partial_prefills as usize,
            "few prefills are left unfinished"
        );
    }

    fn check_confined(&self, view: &StepView) {
        assert_eq!(
            self.oldest(),
            None,
            "a quarantine group runs one step at a time"
        );
        for row in view.sequence_rows() {
            let account = &self.ledger.accounts[&row.handle];
            assert!(
                account.suspect_until.is_some() || !account.is_live(),
                "a quarantine group runs by itself"
            );
        }
    }

    /// Gained tables and changes make up what the core holds, entry by entry.
    fn check_tables(&mut self, view: &StepView) {
        for gain in &view.gained {
            self.tables[gain.seat].clone_from(&gain.blocks);
        }
        for &(seat, column, block) in &view.changes {
            if let Some(place) = self.tables[seat].get_mut(column) {
                // The entries of a contiguous sequence's table that hold nothing yet go with the rest.
                let is_moved = view.moves.contains(&(*place, block));
                assert!(
                    is_moved || self.config.contiguous,
                    "an entry changes by a move"
                );
                *place = block;
            } else {
                assert_eq!(column, self.tables[seat].len(), "a table grows at its end");
                self.tables[seat].push(block);
            }
        }
        for (seat, _) in self
            .holders
            .iter()
            .enumerate()
            .filter(|(_, holder)| holder.is_some())
        {
            let table = self.core.kv().table(Seat(seat as u32));
            // The runner clears what is behind the window by itself.
            let num_behind = self.core.kv().num_behind(Seat(seat as u32)) as usize;
            self.tables[seat][..num_behind].fill(0);
            assert!(
                table
                    .iter()
                    .map(|block| block.0)
                    .eq(self.tables[seat].iter().copied()),
                "the runner was told the whole table of seat {seat}"
            );
        }
    }

    /// Whether a plan that was just made is a quarantine group's. A static gang that got past its failure keeps the batch.
    fn is_confined_now(&self) -> bool {
        let is_suspect = |handle: &u64| self.ledger.accounts[handle].suspect_until.is_some();
        self.ledger.has_suspects()
            && (!is_static(&self.config) || self.holders.iter().flatten().any(is_suspect))
    }
}
