from __future__ import annotations

from lamina.predict.device_presets import preset
from lamina.sim.cost_accounting import CostAccounting, DeviceUsage

H200 = preset("h200")


def test_a_lease_counts_its_units_for_its_time():
    account = DeviceUsage(H200, 0)
    account.lease(100, 300, 0b1111)
    assert (account.leased, account.held(1_000)) == (800, 800)


def test_a_standing_slice_is_held_whether_it_is_used_or_not():
    account = DeviceUsage(H200, 0)
    account.set_reserved(0, "a-1", 0b1111)
    assert (account.leased, account.held(1_000)) == (0, 4_000)


def test_a_lease_inside_a_standing_slice_is_paid_once():
    account = DeviceUsage(H200, 0)
    account.set_reserved(0, "a-1", 0b1111)
    account.lease(100, 300, 0b111100)  # two units inside, two outside
    assert account.held(1_000) == 4_000 + 2 * 200


def test_a_standing_slice_that_moves_is_held_at_each_size_for_its_time():
    account = DeviceUsage(H200, 0)
    account.set_reserved(0, "a-1", 0b1111)
    account.set_reserved(600, "a-1", 0b1)
    account.set_reserved(800, "a-1", 0)
    assert account.held(1_000) == 4 * 600 + 1 * 200


def test_a_batch_that_is_lost_is_held_until_then():
    account = DeviceUsage(H200, 0)
    account.lease(100, 300, 0b11)
    account.shorten_lease(150, 300, 0b11)
    assert (account.leased, account.held(1_000), sum(account.leased_series.sums)) == (100, 100, 100.0)


def test_a_device_is_present_from_its_coming_to_its_going():
    ledger = CostAccounting()
    ledger.device_joined(1_000, H200)
    ledger.device_left(4_000, "h200")
    assert ledger.devices["h200"].present_us(9_000) == 3_000


def test_a_device_that_comes_back_gets_a_new_account_and_keeps_the_old():
    ledger = CostAccounting()
    ledger.device_joined(0, H200)
    ledger.devices["h200"].lease(0, 10, 1)
    ledger.device_left(100, "h200")
    ledger.device_joined(500, H200)
    assert [(account.joined_us, account.leased) for account in ledger.all_devices()] == [(0, 10), (500, 0)]


def test_unloading_an_instance_ends_its_standing_slice():
    ledger = CostAccounting()
    ledger.device_joined(0, H200)
    ledger.instance_loaded(0, "a", "a-1", "h200", 0b11)
    ledger.instance_unloaded(400, "a-1")
    assert (ledger.devices["h200"].held(1_000), ledger.cold_starts) == (800, {"a": 1})


def test_a_device_is_occupied_while_anything_is_loaded_on_it():
    ledger = CostAccounting()
    ledger.device_joined(0, H200)
    ledger.instance_loaded(100, "a", "a-1", "h200", 0)
    ledger.instance_loaded(200, "b", "b-1", "h200", 0b11)
    ledger.instance_unloaded(300, "a-1")
    ledger.instance_unloaded(600, "b-1")
    ledger.instance_loaded(900, "a", "a-2", "h200", 0)
    usage = ledger.devices["h200"]
    assert usage.occupied_us(1_000) == 500 + 100
    assert usage.occupied_cost(1_000) == 600 * H200.price_per_s / 1e6


def test_used_counts_batches_and_not_what_stands():
    account = DeviceUsage(H200, 0)
    account.set_reserved(0, "a-1", 0b1111)
    account.lease(100, 300, 0b11)
    assert account.used_cost() == 400 * H200.unit_price()
    assert account.cost(1_000) == 4_000 * H200.unit_price()
