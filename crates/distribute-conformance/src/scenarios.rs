//! The promises, each named after the behaviour.

use std::any::Any;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};

use distribute::prelude::*;

use crate::check::{Outcome, Stop};
use crate::conditions::is_compiled;
use crate::library::{Burn, Candle, Library};
use crate::place::Place;

mod contexts;
mod data;
mod local_updates;
mod models;
mod numbers;
mod optimizers;
mod pretrained;
mod random;
mod rows;
mod served;
mod structures;
mod trainers;
mod values;
mod variables;

/// A promise and the body that checks it.
pub(crate) struct Scenario {
    name: &'static str,
    body: Body,
    /// A part of the error by which a step in one compiled program refuses what the promise is about.
    refusal: Option<&'static str>,
}

enum Body {
    /// A promise of strategies whose replicas train in step.
    OfStrategies(fn(&Strategy) -> Result<(), Stop>),
    /// A promise that parameter servers make, too.
    OfAll(fn(&Place) -> Result<(), Stop>),
}

impl Scenario {
    const fn new(name: &'static str, body: fn(&Strategy) -> Result<(), Stop>) -> Scenario {
        Scenario { name, body: Body::OfStrategies(body), refusal: None }
    }

    const fn of_all(name: &'static str, body: fn(&Place) -> Result<(), Stop>) -> Scenario {
        Scenario { name, body: Body::OfAll(body), refusal: None }
    }

    /// Lets compiled programs refuse it, by an error with these words.
    const fn unless_refused(self, refusal: &'static str) -> Scenario {
        Scenario { refusal: Some(refusal), ..self }
    }
}

/// A scenario of one tensor library, or of strategies alone.
#[derive(Clone)]
pub struct Case {
    /// The scenario's name, with its library's in front.
    pub name: String,
    scenario: &'static Scenario,
    /// The error by which compiled programs refuse all that the library computes.
    refusal: Option<&'static str>,
}

impl Case {
    /// Returns all scenarios.
    pub fn all() -> impl Iterator<Item = Case> {
        let named = |library: &str, scenario: &Scenario| match library {
            "" => scenario.name.to_owned(),
            library => format!("{library}: {}", scenario.name),
        };
        SUITES.into_iter().flat_map(move |Suite { library, refusal, scenarios }| {
            scenarios.iter().map(move |scenario| Case { name: named(library, scenario), scenario, refusal })
        })
    }

    pub(crate) fn run(&self, place: &Place) -> Outcome {
        let run = || match (&self.scenario.body, place) {
            (Body::OfAll(body), place) => body(place),
            (Body::OfStrategies(body), Place::Strategy(strategy)) => body(strategy),
            (Body::OfStrategies(_), Place::Servers { .. }) => {
                Err(Stop::NotApplicable("it is about replicas that train in step; workers of parameter servers do not"))
            }
        };
        match catch_unwind(AssertUnwindSafe(run)) {
            Ok(Ok(())) => Outcome::Passed,
            Ok(Err(Stop::NotApplicable(why))) => Outcome::NotApplicable(why.to_owned()),
            Ok(Err(Stop::Wrong(how))) => {
                let is_in_programs = matches!(place, Place::Strategy(strategy) if is_compiled(strategy));
                match is_in_programs && self.may_be_refused(&how) {
                    true => Outcome::NotApplicable(how),
                    false => Outcome::Failed(how),
                }
            }
            Err(panic) => Outcome::Failed(format!("it panicked: {}", said(panic.as_ref()))),
        }
    }

    /// Returns whether an error is the refusal, in words, of what a compiled program does not do, of this scenario.
    #[must_use]
    pub fn may_be_refused(&self, error: &str) -> bool {
        self.scenario.refusal.into_iter().chain(self.refusal).any(|refusal| error.contains(refusal))
    }
}

fn said(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "(no message)".to_owned())
}

/// The scenarios of one tensor library, or of strategies alone.
struct Suite {
    /// The library's name, or nothing.
    library: &'static str,
    refusal: Option<&'static str>,
    scenarios: &'static [Scenario],
}

const SUITES: [Suite; 5] = [
    Suite { library: "", refusal: None, scenarios: OF_STRATEGIES },
    Suite { library: "candle", refusal: Some(OF_CANDLE_TENSORS), scenarios: Of::<Candle>::SCENARIOS },
    Suite { library: "candle", refusal: Some(OF_CANDLE_TENSORS), scenarios: OF_CANDLE },
    Suite { library: "burn", refusal: None, scenarios: Of::<Burn>::SCENARIOS },
    Suite { library: "burn", refusal: None, scenarios: OF_BURN },
];

/// Compiled programs refuse tensors of candle.
const OF_CANDLE_TENSORS: &str = "candle computes on CPUs and GPUs";

const OF_STRATEGIES: &[Scenario] = &[
    Scenario::new("outside a scope there are the default strategy and no replica", contexts::outside),
    Scenario::new("a scope is the cross-replica context", contexts::scope),
    Scenario::new("inside run there is a replica and its strategy", contexts::replica),
    Scenario::new("strategies cannot be mixed, nor runs nested", contexts::mixing),
    Scenario::new("a strategy can be set for a thread, outside of scopes", contexts::set),
    Scenario::new("merge_call runs once per process with all replicas' values", contexts::merge),
    Scenario::new("replicas that disagree on merge_call get an error", contexts::merge_disagrees),
    Scenario::new("a failing replica ends the run, and the next run works", contexts::failing),
    Scenario::new("a panicking replica is an error, and the next run works", contexts::panicking),
    Scenario::new("run returns one value per replica, in the order of ids", values::ids),
    Scenario::new("values from a function get global ids", values::from_function),
    Scenario::new("reduce combines the replicas' values", values::reduce),
    Scenario::new("a mean over an axis weighs replicas by their examples", values::reduce_axis),
    Scenario::new("gather joins parts of different lengths in the order of ids", values::gather),
    Scenario::new("replicas reduce, gather and broadcast among themselves", values::in_replicas),
    Scenario::new("gather refuses shapes that differ elsewhere", structures::gather_shapes),
    Scenario::new("the mean over rows is over all replicas' rows", structures::rows),
    Scenario::new("nested structures are split, returned and reduced leaf by leaf", structures::nested),
    Scenario::new("structures of other forms are an error in words", structures::of_other_forms),
    Scenario::new("rows with indices are reduced, also in a nest with dense values", structures::indexed_rows),
    Scenario::new("a value is broadcast to every replica", structures::broadcast),
    Scenario::new("an on-write variable is written outside on every replica", variables::on_write_outside),
    Scenario::new("an on-write variable takes the sum of what replicas write", variables::on_write_sum),
    Scenario::new("an on-write variable takes the mean of what replicas write", variables::on_write_mean),
    Scenario::new("an on-write variable takes what the first replica writes", variables::on_write_first),
    Scenario::new("without aggregation a replica's write is an error", variables::on_write_none),
    Scenario::new("replicas may write copies of their own when asked", rows::local_writes),
    Scenario::new("rows that replicas write are summed", rows::scatter_sum),
    Scenario::new("rows that replicas write are averaged over all replicas", rows::scatter_mean),
    Scenario::new("rows may be the first replica's", rows::scatter_first),
    Scenario::new("rows that cannot be aggregated are refused", rows::scatter_refused),
    Scenario::new("rows are written outside on every replica", rows::scatter_outside),
    Scenario::new("an on-read sum adds up what replicas wrote", variables::on_read_sum),
    Scenario::new("an on-read mean averages what replicas wrote", variables::on_read_mean),
    Scenario::new("an on-read variable may be the first replica's", variables::on_read_first),
    Scenario::new("without aggregation an on-read variable is not read outside", variables::on_read_none),
    Scenario::new("setting an on-read sum spreads it, remainder included", variables::on_read_set),
    Scenario::new("adding to an on-read sum outside is an error", variables::on_read_add),
    Scenario::new("initial values are the first replica's", variables::initial),
    Scenario::new("an update touches each component once, in no replica", variables::update),
    Scenario::new("a mean of integers is refused", variables::integer_mean),
    Scenario::new("a variable is saved as one value and restored on any replicas", rows::saved),
    Scenario::new("a worker has variables of its own", rows::of_workers),
    Scenario::new("each replica draws from a random stream of its own", random::streams),
    Scenario::new("random streams continue under another number of replicas", random::restored),
    Scenario::new("a dataset gives every example to one replica once", data::every_example_once),
    Scenario::new("a global batch is cut evenly", data::cut_evenly),
    Scenario::new("workers with unequal files end together, with every example once", data::unequal_padded),
    Scenario::new("a pass over unequal files may stop with the shortest", data::unequal_cut),
    Scenario::new("the end of the data is agreed in the step's own reduction", data::agreed_in_the_step)
        .unless_refused(OF_CANDLE_TENSORS),
    Scenario::new("a pass resumes at its position, whatever the workers", data::resumed),
    Scenario::new("workers whose files end early continue without empty batches", data::ended_early),
    Scenario::new("reductions over rows are those of f64 on hard values", numbers::reductions),
    Scenario::new("the least and the greatest of zeros have one sign on all replicas", numbers::zeros),
];

/// The scenarios of every tensor library.
struct Of<L>(PhantomData<L>);

impl<L: Library> Of<L> {
    const SCENARIOS: &'static [Scenario] = &[
        Scenario::new("a run that fails leaves every replica as it was", optimizers::taken_back::<L>),
        Scenario::new("a dense model trains as on one replica", models::dense::<L>),
        Scenario::new("a convolutional model trains as on one replica", models::convolutional::<L>),
        Scenario::new("an embedding trains as on one replica", models::embedded::<L>),
        Scenario::new("a large embedding, of which a step uses few rows, trains as on one", models::vocabulary::<L>),
        Scenario::new("a recurrent model trains as on one replica", models::recurrent::<L>),
        Scenario::new("a model of long short-term memory trains as on one replica", models::long_short::<L>),
        Scenario::new("two inputs through one layer train as on one replica", models::siamese::<L>),
        Scenario::new("batch normalisation of each replica's own keeps parameters equal", models::normed_apart::<L>)
            .unless_refused("running statistics, such as those of batch normalisation, is used in run_step"),
        Scenario::new("uneven batches train as on one replica", models::uneven::<L>),
        Scenario::new("steps are those of replicas emulated one by one, bit for bit", models::emulated::<L>),
        Scenario::new("sharded optimizer state gives the same parameters, bit for bit", models::sharded::<L>)
            .unless_refused("zero1 does not go with a step in one compiled program"),
        Scenario::new("copies of a trained model are equal", models::copies::<L>),
        Scenario::new("every optimizer trains as on one replica", optimizers::every_kind::<L>),
        Scenario::new("unequal gradients make one step by their mean", optimizers::unequal::<L>),
        Scenario::new("gradients are clipped after they are summed", optimizers::clipped::<L>),
        Scenario::new("accumulated parts train as the whole batch", optimizers::accumulated::<L>)
            .unless_refused("accumulate does not go with a step in one compiled program"),
        Scenario::new("mixed precision follows full precision, with equal copies", optimizers::mixed_precision::<L>)
            .unless_refused("a loss scale does not go with a step in one compiled program"),
        Scenario::new("a step that is not finite is left out on all replicas", optimizers::overflow::<L>)
            .unless_refused("a loss scale does not go with a step in one compiled program"),
        Scenario::new("frozen variables stay as they are", optimizers::frozen::<L>),
        Scenario::new("a copy of a parameter that differs is named", optimizers::diverged::<L>),
        Scenario::new("averages of parameters are equal on all replicas", optimizers::averages::<L>),
        Scenario::new("replicas that train apart become their mean", local_updates::averaged::<L>),
        Scenario::new("replicas that train apart make outer steps together", local_updates::outer_steps::<L>),
        Scenario::new(
            "a checkpoint of the chief's is restored on all workers, and training continues",
            optimizers::restored::<L>,
        ),
        Scenario::new(
            "fit, evaluate and predict give what one replica gives, in the data's order",
            trainers::fitted::<L>,
        ),
        Scenario::new("a model that cannot work on no rows is fitted as on one replica", trainers::reshaped::<L>),
        Scenario::new("weighted examples and partial epochs are fitted as on one replica", trainers::weighted::<L>),
        Scenario::new("a callback that stops on one worker stops all after the same step", trainers::stopped::<L>),
        Scenario::new("what callbacks decide after an epoch is made the same on all workers", trainers::decided::<L>),
        Scenario::new("a training resumes from its backup with equal parameters", trainers::backed_up::<L>),
        Scenario::new(
            "a request of one worker saves on all, and one to leave ends all, after the same step",
            trainers::asked::<L>,
        ),
        Scenario::new("what fails on one worker ends all with its reason", trainers::failed::<L>),
        Scenario::new(
            "optimizers are those of f64 on hard gradients, also where gradients come seldom",
            numbers::optimizers::<L>,
        ),
        Scenario::new("a penalty counts once", optimizers::penalty::<L>),
        Scenario::new(
            "gradients that the program computes or sums itself train as those of a loss",
            optimizers::own_gradients::<L>,
        ),
        Scenario::new("every way to combine devices' values trains alike", optimizers::across_devices::<L>),
        Scenario::new("packs of any size give the same parameters", optimizers::packs::<L>),
        Scenario::new("a model of another strategy is refused", optimizers::model_of_another::<L>),
    ];
}

const OF_CANDLE: &[Scenario] = &[
    Scenario::new("synchronised batch normalisation trains as on one replica", models::normed),
    Scenario::new("values of a file of the chief's are loaded on all workers", pretrained::loaded),
    Scenario::new("batch normalisation is that of f64 on large means and in 16 bits", numbers::norms),
    Scenario::new("layer normalisation is that of f64, and gradients come through", numbers::layers),
    Scenario::new("losses of classes are those of f64 on large logits", numbers::class_losses),
    Scenario::new("losses of values are those of f64 on large values", numbers::value_losses),
    Scenario::new("gradients go back through a sum over replicas", optimizers::through_a_sum),
    Scenario::new("gradients go back through a mean over replicas", optimizers::through_a_mean),
    Scenario::new("gradients go back through a concatenation over replicas", optimizers::through_a_gather),
    Scenario::of_all("a described training fits, evaluates and predicts as on one replica", served::fitted),
    Scenario::of_all("a described training resumes from its backup, under another strategy, too", served::backed_up),
];

const OF_BURN: &[Scenario] = &[
    Scenario::new("a module outside a strategy gives and takes the values of all replicas", pretrained::exchanged),
    Scenario::new("losses of classes are those of f64 on large logits", numbers::burn::class_losses),
    Scenario::new("losses of values are those of f64 on large values", numbers::burn::value_losses),
];
